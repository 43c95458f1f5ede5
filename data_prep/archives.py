"""Reads archives of samples in WebDataset's form (.tar): files that share a name make a sample, each suffix is a field.

An archive, local or on the hub, is read from its beginning to its end. It has no index, so all of it is one segment.
`datasets` is not used: it takes the fields of all samples from the first five, drops what later samples hold besides
those, and ends at the first sample that cannot be decoded.
"""

import tarfile
from collections.abc import Collection, Iterator

from longdraft.data_prep import hub
from longdraft.data_prep.streams import damaged

ARCHIVE_SUFFIXES = (".tar",)


def archive_samples(path: str, fields: Collection[str]) -> Iterator[dict[str, bytes | None]]:
    """The samples of an archive in order: field name -> bytes. Fields that are not in `fields` are None.

    The files of a sample stand next to each other; "a/7.chat.json" is the field "chat.json" of the sample "a/7". Raises
    ValueError if the archive is damaged or is no archive.
    """
    sample: dict[str, bytes | None] = {}
    last = None
    try:
        with hub.open_bytes(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, dot, field = name.partition(".")
                if not (member.isfile() and stem and dot):
                    continue
                if sample and (folder, stem) != last:
                    yield sample
                    sample = {}
                last, content = (folder, stem), archive.extractfile(member)
                sample[field] = content.read() if content is not None and field in fields else None
    except (OSError, EOFError, tarfile.TarError) as error:
        raise damaged(path, error) from error
    if sample:
        yield sample
