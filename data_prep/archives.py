"""Archives of samples, as WebDataset makes them (.tar): a sample is the files of one name, a field each by its suffix.

They are read from begin to end, on this machine and from the hub. An archive has no index, so that all of it is one
segment. Not through `datasets`: it takes all samples' fields from the first five, drops what later ones hold beside
them, and one sample that cannot be decoded ends the archive.
"""

import tarfile
from collections.abc import Collection, Iterator

from longdraft.data_prep import hub
from longdraft.data_prep.streams import damaged

ARCHIVE_SUFFIXES = (".tar",)


def archive_samples(path: str, wanted: Collection[str]) -> Iterator[dict[str, bytes | None]]:
    """The samples of an archive in order: the bytes of their wanted fields, and None for the others.

    The files of a sample stand together; "a/7.chat.json" is the field "chat.json" of the sample "a/7". Raises
    ValueError where the archive is damaged or none.
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
                sample[field] = content.read() if content is not None and field in wanted else None
    except (OSError, EOFError, tarfile.TarError) as error:
        raise damaged(path, error) from error
    if sample:
        yield sample
