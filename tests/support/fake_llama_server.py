"""A small llama-server: answers /health and /completion, and remembers one slot's prompt like the real one.

`write_binary` makes an executable of it with a help text of some version and a fault, if wanted. Its text is
a function of the prompt; it sleeps for no token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BASE_HELP = """usage: llama-server [options]

-h,    --help, --usage                  print usage and exit
-t,    --threads N                      number of threads to use during generation (default: -1)
-tb,   --threads-batch N                number of threads to use during prompt processing
-c,    --ctx-size N                     size of the prompt context (default: 0)
                                        (env: LLAMA_ARG_CTX_SIZE)
-np,   --parallel N                     number of server slots
-m,    --model FNAME                    model path to load
--host HOST                             ip address to listen
--port PORT                             port to listen (default: 8080)
"""
NEW_HELP = (
    BASE_HELP
    + """-fa,   --flash-attn [on|off|auto]       set Flash Attention use (default: 'auto')
-cram, --cache-ram N                    set the maximum cache size in MiB
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM
--spec-draft-n-max N                    number of tokens to draft
--spec-type none,draft-simple,ngram-simple,ngram-mod
                                        comma-separated list of types of speculative decoding to use
--spec-ngram-mod-n-match N              ngram-mod lookup length (default: 24)
--spec-ngram-simple-size-n N            ngram size N for ngram-simple speculative decoding
--spec-ngram-simple-size-m N            ngram size M for ngram-simple speculative decoding
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max
"""
)
OLD_HELP = (
    BASE_HELP
    + """-fa,   --flash-attn                     enable Flash Attention (default: disabled)
--draft-max, --draft, --draft-n N       number of tokens to draft for speculative decoding (default: 16)
"""
)


def write_binary(path: Path, help_text: str, **faults: Any) -> Path:
    """An executable. `faults`: `ends_with` (a flag at which it ends while starting), `short` (one token too
    few), `forgets` (never caches), `dies` (when asked), `starts_file` (gets a JSON line
    of process and arguments per start)."""
    settings = json.dumps({"help": help_text, **{name: str(value) for name, value in faults.items()}})
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.support.fake_llama_server import main\nmain({settings!r})\n"
    )
    path.chmod(0o755)
    return path


def main(settings_text: str) -> None:
    settings = json.loads(settings_text)
    if "--help" in sys.argv:
        print(settings["help"])
        return
    if "--version" in sys.argv:
        print("version: 4711 (abc)", file=sys.stderr)
        return
    if settings.get("ends_with") in sys.argv:
        print("error: it does not like this flag", file=sys.stderr)
        sys.exit(3)
    if "starts_file" in settings:
        with open(settings["starts_file"], "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]}) + "\n")
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    HTTPServer(("127.0.0.1", arguments.port), handler(settings)).serve_forever()


def handler(settings: dict[str, str]) -> type[BaseHTTPRequestHandler]:
    slot: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "dies" in settings:
                print("it is all too much", flush=True)
                os._exit(7)
            prompt, count = body["prompt"], body["n_predict"] - ("short" in settings)
            assert body["temperature"] == 0 and body["ignore_eos"] and self.path == "/completion"
            shared = 0
            if body["cache_prompt"] and "forgets" not in settings:
                pairs = zip(slot, prompt[:-1], strict=False)
                shared = next(
                    (i for i, (a, b) in enumerate(pairs) if a != b), min(len(slot), len(prompt) - 1)
                )
            slot[:] = prompt
            self._send(
                {
                    "content": f"{sum(prompt)}",
                    "tokens_predicted": count,
                    "tokens_evaluated": len(prompt),
                    "timings": {"prompt_n": len(prompt) - shared, "predicted_n": count},
                }
            )

        def _send(self, value: dict[str, Any]) -> None:
            raw = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
