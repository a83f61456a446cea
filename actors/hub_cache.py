"""Is the folder of a model one of the Hugging Face Hub's cache, which is not ours to write to?"""

from __future__ import annotations

from pathlib import Path


def in_hub_cache(folder: str | Path) -> bool:
    """Whether it is a snapshot there. Its files are links to what is named by hashes, its name is
    a commit, and another commit of the same weights is another folder."""
    snapshots = Path(folder).absolute().parent
    return snapshots.name == "snapshots" and (snapshots.parent / "blobs").is_dir()
