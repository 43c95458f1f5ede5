"""Archives of samples, as WebDataset makes them (.tar): a sample is the files of one name, a field each by its suffix.

They are read through `datasets`, streaming, on this machine and on the hub. An archive has no index, so that all of it
is one segment.
"""

import glob
import os
from collections.abc import Iterator
from tarfile import TarError
from typing import Any

import pyarrow as pa

from longdraft.data_prep.streams import damaged

ARCHIVE_SUFFIXES = (".tar",)


def archive_samples(path: str) -> Iterator[dict[str, Any]]:
    """The samples of an archive in order, with their fields. A .txt is a text, a .json what it holds.

    Raises ValueError where the archive is damaged, is none of samples, or its samples have fields of different types.
    """
    # Else `datasets` reports each file that it loads, local ones too, to a counter on the network.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    import datasets  # takes two seconds

    try:
        yield from datasets.load_dataset("webdataset", data_files=glob.escape(path), split="train", streaming=True)
    except (OSError, ValueError, TarError, pa.ArrowException) as error:
        raise damaged(path, error) from error
