"""Draft sizes: what the drafters of a target take of memory, from headers and configs, no weight read.

Their weights as their files have them; the head's rows of a draft vocabulary; and keys and values: of an MTP
module one more layer of the target's blocks, of a block drafter a side car, perhaps of a window alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quickdraft.engine.dflash_drafter import side_dtype
from quickdraft.engine.mtp_drafter import SOURCE as MTP
from quickdraft.engine.open_drafters import DraftFolder
from quickdraft.models.dflash_config import DFlashConfig
from quickdraft.models.dflash_loading import DRAFT_VOCAB
from quickdraft.models.draft_vocab import DraftVocab, head_name
from quickdraft.models.inspect import KV_DTYPES
from quickdraft.models.loading.drafter_folder import DrafterFolder
from quickdraft.models.loading.folder import CONFIG, ModelFolder
from quickdraft.models.loading.strict_files import is_there
from quickdraft.models.registry import TargetFile
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype
from quickdraft.state.spec import PagedKV


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """Of one drafter, in bytes. `window_tokens`: of which a sequence keeps keys and values; None: of all."""

    source: str
    path: str
    weight_bytes: int
    vocab_ids: int | None  # of its draft vocabulary; None: it chooses among all
    head_bytes: int  # of these ids' rows of the target's head, kept a second time
    kv_bytes_per_token: Mapping[KVDtype, int]  # by the type of the target's keys and values
    window_tokens: int | None

    @property
    def resident_bytes(self) -> int:
        """What is there whatever requests do."""
        return self.weight_bytes + self.head_bytes


def drafter_sizes(folders: Sequence[DraftFolder], target: TargetFile) -> tuple[DrafterSizes, ...]:
    """Of these folders; ModelFormatError or UnsupportedError for one that does not fit the target."""
    return tuple(_sizes(folder, target) for folder in folders)


def _sizes(folder: DraftFolder, target: TargetFile) -> DrafterSizes:
    config, window = target.config, None
    if folder.source == MTP:
        file: ModelFolder | DrafterFolder = ModelFolder(folder.path)
        layers, heads, dim = 1, config.kv_heads, config.head_dim
    else:
        own = DFlashConfig.read(folder.config, config, str(folder.path / CONFIG))
        file, window = DrafterFolder(folder.path), own.longest_window
        layers, heads, dim = own.layers, own.kv_heads, own.head_dim

    def kept(dtype: KVDtype) -> PagedKV:
        return PagedKV(heads, dim, dtype if folder.source == MTP else side_dtype(dtype))

    per_token = {dtype: layers * kept(dtype).bytes_per_block // BLOCK_TOKENS for dtype in KV_DTYPES}
    vocab, head_bytes = None, 0
    if is_there(folder.path / DRAFT_VOCAB):
        vocab = len(DraftVocab.load(folder.path / DRAFT_VOCAB, config.vocabulary_size))
        head = target.file.tensors[head_name(target.file)]
        head_bytes = head.bytes * vocab // head.shape[0]
    weights = sum(info.bytes for info in file.tensors.values())
    return DrafterSizes(folder.source, str(folder.path), weights, vocab, head_bytes, per_token, window)
