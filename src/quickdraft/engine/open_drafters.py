"""Opening drafters: which folders draft for a target, and the modules they become.

A folder that was asked for and cannot draft for this target is an error that says why, and so are two of one
source. Without any that were asked for, those shipped in the package for exactly this target's weight file
are taken. What a folder holds is read in models (dflash_loading, mtp_folder); knows no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quickdraft.engine.dflash_drafter import SOURCES as DFLASH_SOURCES
from quickdraft.engine.dflash_drafter import DFlashDrafter, side_dtype
from quickdraft.engine.mtp_drafter import SOURCE as MTP
from quickdraft.engine.mtp_drafter import MTPDrafter
from quickdraft.engine.mtp_opening import with_mtp
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.models.dflash import DFlashModule
from quickdraft.models.dflash_config import DFlashConfig, drafter_version
from quickdraft.models.dflash_loading import DRAFT_VOCAB, DraftTarget, load_dflash
from quickdraft.models.digest import weight_digests
from quickdraft.models.interface import LoadedModel, Taps
from quickdraft.models.loading.folder import CONFIG, SINGLE
from quickdraft.models.loading.strict_files import is_there, read_object
from quickdraft.models.mtp import MTPModule
from quickdraft.models.mtp_folder import TARGET_KEY
from quickdraft.models.registry import TargetFile
from quickdraft.ops.interface import KVDtype, Ops
from quickdraft.speculate.costs import Costs
from quickdraft.speculate.draft import AUTO_MODELS
from quickdraft.speculate.promise import auto_models
from quickdraft.state.spec import PagedKV

SHIPPED: Final = Path(__file__).resolve().parents[1] / "drafters"


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """A drafter that was found, its weights not read yet."""

    path: Path
    source: str
    config: dict[str, Any]

    @property
    def shipped(self) -> bool:
        """Whether it came with the package."""
        return self.path.parent == SHIPPED

    @property
    def files(self) -> tuple[Path, ...]:
        """They determine what it writes into the blocks of a sequence."""
        return self.path / CONFIG, self.path / SINGLE


@dataclass(frozen=True, slots=True)
class DraftModels:
    """The modules that draft for a target: its own MTP module or a folder's, and block drafters."""

    mtp: MTPModule | None
    dflash: tuple[DFlashModule, ...]

    def side_bytes(self, dtype: KVDtype, places: Callable[[DFlashModule], int]) -> int:
        """Bytes of the drafters' own caches with so many blocks each."""
        return sum(
            _paged(module, dtype).bytes_per_block * module.config.layers * places(module)
            for module in self.dflash
        )

    def in_auto(self, source: str) -> bool:
        """Whether a request with `auto` uses it: the first of AUTO_MODELS that is here."""
        here = {DFLASH_SOURCES[module.config.version] for module in self.dflash}
        here |= {MTP} if self.mtp is not None else set()
        return source == next((name for name in AUTO_MODELS if name in here), None)


def settle_auto(
    drafters: Sequence[MTPDrafter | DFlashDrafter], folders: Sequence[DraftFolder], costs: Costs
) -> None:
    """`auto` uses the models that promise most at these costs, by what the folders note (promise.py)."""
    best = auto_models([drafter.source for drafter in drafters], held_out(folders), costs)
    for drafter in drafters:
        drafter.in_auto = drafter.source in best


def held_out(folders: Sequence[DraftFolder]) -> dict[str, tuple[float, ...]]:
    """By source, what a folder notes of its drafts on held-out texts: tokens per step for 1, 2, .. tokens."""
    return {folder.source: tuple(_held_out(folder.config)) for folder in folders}


def _held_out(config: dict[str, Any]) -> list[float]:
    """Tokens per step for drafts of 1, 2, .. tokens; nothing where it is not a list of such numbers."""
    note = config.get("training")
    found = note.get("held_out_tokens_per_step") if isinstance(note, dict) else None
    sound = isinstance(found, list) and all(
        isinstance(one, int | float) and 1.0 <= one <= 64.0 for one in found
    )
    return list(found) if found and sound else []


def find_drafters(given: Sequence[Path] | None, target: TargetFile) -> tuple[DraftFolder, ...]:
    """The folders in `given`, or where it is None those shipped for `target`.

    ConfigError for a folder that is not there or two of one source, ModelFormatError or UnsupportedError for
    what is no drafter.
    """
    found = _shipped(target) if given is None else tuple(read_folder(path) for path in given)
    for source, count in Counter(folder.source for folder in found).items():
        if count > 1:
            names = " and ".join(str(folder.path) for folder in found if folder.source == source)
            raise ConfigError(
                f"{count} drafters of source '{source}'", got=names, expected="one of each source at most"
            )
    return found


def read_folder(path: Path) -> DraftFolder:
    """What the folder says it is."""
    if not path.is_dir():
        raise ConfigError(
            "no drafter there", got=str(path), expected="a folder with config.json and model.safetensors",
            hint="--drafter names a folder; none turns off those that are shipped",
        )  # fmt: skip
    values = read_object(path / CONFIG)
    return DraftFolder(path, _source(values, str(path / CONFIG)), values)


def taps_for(folders: Sequence[DraftFolder], target: TargetFile) -> Taps:
    """The residual streams that the folders' drafters read."""
    layers: set[int] = set()
    for folder in folders:
        if folder.source != MTP:
            config = DFlashConfig.read(folder.config, target.config, str(folder.path / CONFIG))
            layers |= set(config.target_layers)
    return Taps(layers=tuple(sorted(layers)))


def load_drafters(
    folders: Sequence[DraftFolder], loaded: LoadedModel, mtp_vocab: Path | None, ops: Ops
) -> DraftModels:
    """Read the weights; errors name file and key or tensor. `mtp_vocab`: see with_mtp."""
    mtp_path = next((folder.path for folder in folders if folder.source == MTP), None)
    mtp = with_mtp(loaded, mtp_path, mtp_vocab, ops).mtp
    others = [folder for folder in folders if folder.source != MTP]
    return DraftModels(mtp, tuple(load_dflash(each.path, _target(each, loaded), ops) for each in others))


def explain_folder(folder: DraftFolder) -> str:
    """One line for the start of a server."""
    has_own = folder.source != MTP and is_there(folder.path / DRAFT_VOCAB)  # of MTP see explain_vocab
    vocab = f", choosing among the ids of {DRAFT_VOCAB}" if has_own else ""
    return f"drafter {folder.source}: {folder.path}{vocab}"


def _target(folder: DraftFolder, loaded: LoadedModel) -> DraftTarget:
    parts, wanted = loaded.model.parts, folder.config.get(TARGET_KEY)

    def sha256() -> str:
        digests = weight_digests(loaded.files)
        return str(wanted) if wanted in digests else digests[0]

    return DraftTarget(
        loaded.model.config, parts.embedding, parts.head, parts.head_bias, loaded.tensors, sha256
    )


def _source(values: dict[str, Any], where: str) -> str:
    version = drafter_version(values)
    if version is not None:
        return DFLASH_SOURCES[version]
    names = values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and "MTP" in names[0]:
        return MTP
    raise UnsupportedError(
        f"{where}: architectures", got=repr(names)[:80], expected="a DFlash2, DFlash or MTP drafter"
    )


def _shipped(target: TargetFile) -> tuple[DraftFolder, ...]:
    """Those in the package whose target_sha256 is the digest of a weight file of the target, by name; the
    file is read only where width and vocabulary fit."""
    if not SHIPPED.is_dir():
        return ()
    folders = [read_folder(path) for path in sorted(SHIPPED.iterdir()) if is_there(path / CONFIG)]
    sizes = {"hidden_size": target.config.width, "vocab_size": target.config.vocabulary_size}
    near = [folder for folder in folders if sizes.items() <= folder.config.items()]
    digests = weight_digests(target.files) if near else []
    return tuple(folder for folder in near if folder.config.get(TARGET_KEY) in digests)


def _paged(module: DFlashModule, dtype: KVDtype) -> PagedKV:
    return PagedKV(module.config.kv_heads, module.config.head_dim, side_dtype(dtype))
