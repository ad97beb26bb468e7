"""What the disk store counts; plain numbers for logs and metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """What the store has done since it was opened, and how it stands."""

    hits: int = 0  # restores that gave at least one block
    restored_tokens: int = 0
    restored_bytes: int = 0
    written_segments: int = 0
    written_bytes: int = 0
    restored_states: int = 0  # recurrent states
    written_states: int = 0
    evicted_segments: int = 0  # files, for room, states and other models' included
    rejected_files: int = 0  # damaged, of another version or key, and those below a damaged one
    segments: int = 0  # of this model, on disk now
    states: int = 0  # of this model, on disk now
    bytes_on_disk: int = 0  # of all models
    not_writing: str = ""  # why nothing is written; empty while it is

    def plus(self, **more: int) -> DiskCounters:
        """These with some of the numbers raised."""
        values = {name: getattr(self, name) + value for name, value in more.items()}
        return replace(self, **values)
