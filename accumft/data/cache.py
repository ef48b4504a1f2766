"""Tables that are made once and kept on disk under a name that says all that they were made from.

They are Arrow files, read as a memory map: the operating system keeps of them what is in use, so memory does not grow
with their rows. Nothing here talks to other processes but by a file lock. Whoever holds it makes the table and the
others wait as long as it takes, while a collective operation would end in the timeout of its process group.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from accumft.data.files import blocks_of

if TYPE_CHECKING:
    import datasets

FOLDER_VARIABLE = "ACCUMFT_CACHE"
"""Environment variable: the folder of the cache; empty: nothing is written to disk."""

_HEAD_START = 1.0  # seconds
_logger = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """Where tables are kept: what FOLDER_VARIABLE says, else a folder in the cache of `datasets`; None: nowhere."""
    import datasets

    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return Path(datasets.config.HF_DATASETS_CACHE) / "accumft"
    return Path(folder).expanduser() if folder else None


def made_once(kind: str, made_from: Sequence[Any], write: Callable[[str], Any]) -> datasets.Dataset | None:
    """The table of that kind made from those things, read from the cache, or made and put there.

    Several processes may ask for it at the same time: one makes it. A file that is not exactly what was once written
    is made anew.

    Args:
        kind: first part of the file's name.
        made_from: all that the table depends on: texts, numbers, None, lists of them.
        write: makes the table, as an Arrow stream in a file of the given path.

    Returns:
        None if there is no folder that can be written to: the caller must then do without.
    """
    folder = cache_folder()
    if folder is None:
        return None
    name = f"{kind}-{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}"
    table, seal = folder / f"{name}.arrow", folder / f"{name}.json"
    found = _open(table, seal)
    if found is not None:
        return found
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first:
        # The first process shows the progress, so let it have the lock. It is no matter if it comes too late for that.
        time.sleep(_HEAD_START)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may hold clinical texts, as token ids
        with FileLock(folder / f"{name}.lock"):
            found = _open(table, seal)  # another process may have made it meanwhile
            return found if found is not None else _make(table, seal, write)
    except (OSError, NotImplementedError) as error:  # the latter where the file system knows no locks
        if is_first:
            _logger.warning(
                "%s cannot be written (%s), so memory is used instead; set %s to another folder",
                folder,
                error,
                FOLDER_VARIABLE,
            )
        return None


def _make(table: Path, seal: Path, write: Callable[[str], Any]) -> datasets.Dataset | None:
    """Writes beside the place and renames, the table first: without a seal that fits, it counts for nothing."""
    if table.exists() or seal.exists():
        _logger.warning("%s: damaged, so it is made anew", table)
    partial = table.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(mode=0o700)
    try:
        write(str(partial / table.name))
        (partial / seal.name).write_text(json.dumps(_digest(partial / table.name)))
        for path in (partial / table.name, partial / seal.name):
            path.chmod(0o600)  # whatever the folder allows: it may hold clinical texts, as token ids
        os.replace(partial / table.name, table)
        os.replace(partial / seal.name, seal)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _open(table, seal)


def _open(table: Path, seal: Path) -> datasets.Dataset | None:
    """The table, if its content is the one that was sealed."""
    import datasets

    try:
        if json.loads(seal.read_text()) != _digest(table):
            return None
        return datasets.Dataset.from_file(str(table))
    except (OSError, ValueError):  # ArrowInvalid is a ValueError
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_tokens(dataset: datasets.Dataset, besides: str = "") -> str:
    """The start of the SHA-256 of the lists in "input_ids" and "labels" of all rows, and of `besides`."""
    import numpy as np

    digest = hashlib.sha256(besides.encode())
    for block in blocks_of(dataset.select_columns(["input_ids", "labels"])):
        for column in block.columns:
            lists = column.combine_chunks()
            digest.update(np.diff(lists.offsets.to_numpy()).astype(np.int64).tobytes())
            digest.update(lists.flatten().to_numpy().astype(np.int64).tobytes())
    return digest.hexdigest()[:16]


def digest_of_texts(dataset: datasets.Dataset, columns: Sequence[str]) -> str:
    """SHA-256 of the cells of some text columns, in their order, however the data set stores them."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    digest = hashlib.sha256()
    for block in blocks_of(dataset.select_columns(list(columns))):
        for name in columns:
            # Sizes before contents: the same characters cut into other cells are other texts.
            cells = pa.concat_arrays(block[name].cast(pa.large_binary()).chunks)
            sizes = pc.fill_null(pc.binary_length(cells), -1)
            digest.update(sizes.to_numpy(zero_copy_only=False).tobytes())
            _, offsets, characters = cells.buffers()
            ends = np.frombuffer(offsets, np.int64)[cells.offset : cells.offset + len(cells) + 1]
            if characters is not None:
                digest.update(memoryview(characters)[ends[0] : ends[-1]])
    return digest.hexdigest()


def digest_of_tokenizer(tokenizer: Any) -> str | None:
    """SHA-256 of all that decides what a tokenizer makes of a text, where it lies not included.

    None if that cannot be known: its class is not of transformers, and its source is not to be had.
    """
    import tokenizers
    import transformers

    digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
    for kind in type(tokenizer).__mro__:
        digest.update(f"{kind.__module__}.{kind.__qualname__}\n".encode())
        if kind.__module__.split(".")[0] not in ("transformers", "builtins"):
            try:
                digest.update(Path(inspect.getfile(kind)).read_bytes())
            except (OSError, TypeError):  # defined in a notebook
                return None
    digest.update(json.dumps(_settings(vars(tokenizer)), sort_keys=True, default=repr).encode())
    digest.update(json.dumps(_settings(tokenizer.init_kwargs), sort_keys=True, default=repr).encode())
    digest.update(repr(sorted(tokenizer.special_tokens_map.items(), key=repr)).encode())
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the last call happened to set; each call sets them as its arguments say.
        backend["truncation"] = backend["padding"] = None
        digest.update(json.dumps(backend).encode())
        return digest.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            # This one names folders; what it says besides is among the settings above.
            if path.is_file() and path.name != "tokenizer_config.json":
                digest.update(f"{path.name} {_digest(path)}\n".encode())
    return digest.hexdigest()


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Those that are plain values, or lists of them, but for the ones that only say where the tokenizer comes from."""
    plain = (str, int, float, bool, type(None))
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, plain) or (isinstance(value, list | tuple) and all(isinstance(v, plain) for v in value))
        if name not in ("name_or_path", "is_local", "local_files_only", "files_loaded", "verbose", "token")
        if not name.endswith(("_file", "commit_hash"))
    }
