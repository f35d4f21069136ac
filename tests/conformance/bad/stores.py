"""Stores that lose, keep or give out what they must not."""

from shutil import move, rmtree

from conformance.part import Part
from forge_ckpt.store.local import LocalStore
from forge_core.errors import CheckpointError


class Truncates(LocalStore):
    """Gives what is there where there is less than was asked for."""

    def read(self, path, offset=0, length=None):
        return super().read(path)[offset:][:length]


class Off(LocalStore):
    def read(self, path, offset=0, length=None):
        return super().read(path, offset + 1 if offset else 0, length)


class Forgets(LocalStore):
    """Keeps files in memory only."""

    def write(self, path, chunks):
        vars(self).setdefault("files", {})[path] = b"".join(chunks)

    def read(self, path, offset=0, length=None):
        return vars(self).get("files", {}).get(path, b"")[offset:][:length]

    def read_into(self, path, offset, buffer):
        buffer[:] = self.read(path, offset, len(buffer))

    def size(self, path):
        return len(self.read(path))


class Collects(LocalStore):
    """Asks for all chunks before it writes one."""

    def write(self, path, chunks):
        super().write(path, list(chunks))


class Merges(LocalStore):
    """Moves into a directory that is there."""

    def rename(self, source, target):
        if (self.root / target).is_dir():
            move(self.root / source, self.root / target)
        else:
            super().rename(source, target)


class Promises(LocalStore):
    """Says that it linked."""

    def link(self, source, target):
        return True


class Moves(LocalStore):
    """Takes the first name away."""

    def link(self, source, target):
        if not (self.root / source).exists():
            return False
        self.write(target, [self.read(source)])
        self.remove(source)
        return True


class Others(LocalStore):
    def link(self, source, target):
        if not (self.root / source).exists():
            return False
        self.write(target, [self.read(source)[::-1]])
        return True


class Tries(LocalStore):
    """Says False, and leaves something."""

    def link(self, source, target):
        self.write(target, [b""])
        return False


class Copies(LocalStore):
    """Leaves the old name."""

    def rename(self, source, target):
        files = [source] if (self.root / source).is_file() else [f"{source}/{name}" for name in self.list(source)]
        for file in files:
            self.write(file.replace(source, target, 1), [self.read(file)])


class Unsorted(LocalStore):
    def list(self, path=""):
        return list(super().list(path))[::-1]


class Keeps(LocalStore):
    def remove(self, path):
        if "/" in path:
            super().remove(path)


class Zealous(LocalStore):
    def remove(self, path):
        rmtree(self.root / path.split("/")[0], ignore_errors=True)


class Empty(LocalStore):
    """A missing file is an empty one."""

    def size(self, path):
        try:
            return super().size(path)
        except FileNotFoundError:
            return 0


class Trusting(LocalStore):
    """Follows any name."""

    def write(self, path, chunks):
        try:
            super().write(path, chunks)
        except CheckpointError:
            return


BAD = {
    "check_bytes": [
        (Part(make=Off), r"read\(path, offset, length\)"),
        (Part(make=Forgets), "read gives other bytes than were written"),
    ],
    "check_chunks": [(Part(make=Collects), "keeps a chunk while it asks for the next one")],
    "check_rename": [(Part(make=Merges), "replaces a directory"), (Part(make=Copies), "under its old name")],
    "check_list": [
        (Part(make=Unsorted), "not a, b, c in order"),
        (Part(make=Keeps), "leaves something"),
        (Part(make=Zealous), "removes another, or none"),
    ],
    "check_link": [
        (Part(make=Promises), "gave a missing file a name"),
        (Part(make=Moves), "takes the first name away"),
        (Part(make=Others), "other bytes"),
        (Part(make=Tries), "leaves a file"),
    ],
    "check_missing": [(Part(make=Empty), "size of a missing file"), (Part(make=Truncates), "past the end of a file")],
    "check_outside": [(Part(make=Trusting), "takes the path '../outside'")],
}
