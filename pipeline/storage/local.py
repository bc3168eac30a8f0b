"""A bucket in a local folder, shared by processes of one machine.

An object is an ordinary file at its key, so that pandas, DuckDB and vLLM read it as it lies. All else is in
`.miles/` at the root, on the same file system: temporary files, a lock per stripe of keys, and each object's
metadata, filed under key and inode, so that a file damaged in place is known by them. A copy of the folder (cp -a) has
other inodes, hence no metadata: its objects are read, but no damage to them is noticed. The etag is the file's (inode,
modification time, size): a version is written beside the one it follows, so no two in a row share an inode.

Creating is link(2), which fails where a name exists (rename(2) would replace it in silence). Replacing compares
the etag and renames under an exclusive lock of the key. File and folder are flushed to disk before a write is
acknowledged. Network file systems: NFS from version 4 on, with its locks; the start-up probe refuses others.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from pipeline.storage.bucket import ABSENT, Conflict, Object, ObjectInfo, StorageError, Transient, check_size

P = ParamSpec("P")
T = TypeVar("T")

HIDDEN = ".miles"
LOCKS = 256
LOCK_TRIES = 500
LOCK_PAUSE_S = 0.002
STALE_S = 24 * 3600.0
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EAGAIN, errno.EIO, errno.ETIMEDOUT, errno.EINTR}


class LocalBucket:
    def __init__(self, root: str, read_only: bool = False):
        """Open the folder `root`, made if missing; raises StorageError if it cannot be written to.

        `read_only`: it must be there, and nothing is written to it.
        """
        self.root = os.path.realpath(root)
        self.name = pathlib.Path(self.root).as_uri()
        self._temporary = os.path.join(self.root, HIDDEN, "temporary")
        self._locks = os.path.join(self.root, HIDDEN, "locks")
        if read_only:
            if not os.path.isdir(self.root):
                raise StorageError(f"{self.name}: there is no such folder")
            return
        try:
            os.makedirs(self._temporary, exist_ok=True)
            os.makedirs(self._locks, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise StorageError(f"{self.name} cannot be written to: {error.strerror}") from None

    async def read(self, key: str) -> Object | None:
        return await self._call(self._read, key)

    async def read_range(self, key: str, start: int, stop: int, etag: str) -> bytes:
        return await self._call(self._read_range, key, start, stop, etag)

    async def stat(self, key: str) -> tuple[ObjectInfo, dict[str, str]] | None:
        return await self._call(self._stat, key)

    async def write(self, key: str, data: bytes, metadata: dict[str, str], condition: str | None) -> ObjectInfo:
        return await self._call(self._write, key, lambda file: file.write_bytes(data), metadata, condition)

    async def upload(self, key: str, path: str, metadata: dict[str, str]) -> ObjectInfo:
        return await self._call(self._write, key, lambda file: shutil.copyfile(path, file), metadata, None)

    async def list(self, folder: str) -> list[ObjectInfo]:
        return await self._call(lambda: list(self._walk(folder)))

    async def delete(self, key: str) -> None:
        await self._call(self._delete, key)

    async def unsealed(self) -> int:
        """Objects without metadata: what made or copied them has left their checksums behind, or there were none."""

        def count() -> int:
            kept = os.path.join(self.root, HIDDEN, "metadata")
            return sum(
                not os.path.exists(os.path.join(kept, info.key, info.etag.partition("-")[0])) for info in self._walk("")
            )

        return await self._call(count)

    async def abandoned(self) -> tuple[ObjectInfo, ...]:
        """Temporary files of writers that were killed; whoever opens the folder to write removes them."""
        return await self._call(lambda: tuple(self._stale()))

    async def _call(self, call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Run file-system work on a thread, its faults told apart."""
        try:
            return await asyncio.to_thread(call, *arguments, **keywords)
        except OSError as error:
            kind = Transient if error.errno in PASSING else StorageError
            raise kind(f"{self.name}: {error.strerror or error} ({error.filename})") from None

    def _read(self, key: str) -> Object | None:
        with self._open(key) as file:
            if file is None:
                return None
            info, metadata = self._describe(key, file)
            check_size(self.name, info, metadata)
            with open(file, "rb", closefd=False) as stream:
                return Object(info, stream.read(), metadata)

    def _read_range(self, key: str, start: int, stop: int, etag: str) -> bytes:
        with self._open(key) as file:
            if file is None or _etag(os.fstat(file)) != etag:
                raise Conflict(f"{self.name}/{key} has changed while it was read")
            return os.pread(file, stop - start, start)

    def _stat(self, key: str) -> tuple[ObjectInfo, dict[str, str]] | None:
        with self._open(key) as file:
            return self._describe(key, file) if file is not None else None

    def _write(
        self, key: str, fill: Callable[[pathlib.Path], object], metadata: dict[str, str], condition: str | None
    ) -> ObjectInfo:
        """Write beside, file the metadata, flush, then give it its name at once."""
        final = self._path(key)
        temporary = os.path.join(self._temporary, secrets.token_hex(16))
        try:
            fill(pathlib.Path(temporary))
            _flush(temporary)
            found = os.stat(temporary)
            record = self._record(key, found)
            _make_folders(os.path.dirname(record), self.root)
            pathlib.Path(record).write_text(json.dumps(metadata))
            _flush(record)
            try:
                _make_folders(os.path.dirname(final), self.root)
                if condition == ABSENT:
                    self._link(temporary, final)
                else:
                    self._rename(key, temporary, final, condition)
            except BaseException:
                os.unlink(record)
                raise
            _flush(os.path.dirname(final))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)

    def _link(self, temporary: str, final: str) -> None:
        try:
            os.link(temporary, final)
        except FileExistsError:
            # NFS may answer so to its own repeated request: two names tell that the link is there.
            if os.stat(temporary).st_nlink != 2:
                raise Conflict(f"{final} exists") from None

    def _rename(self, key: str, temporary: str, final: str, condition: str | None) -> None:
        with self._lock(key), _held(final) as present:
            if condition is not None and condition != (present and _etag(present)):
                raise Conflict(f"{final} has changed")
            os.rename(temporary, final)
            if present:
                self._forget(key, present)

    def _delete(self, key: str) -> None:
        final = self._path(key)
        with self._lock(key), _held(final) as present:
            if present:
                os.unlink(final)
                self._forget(key, present)

    def _walk(self, folder: str) -> Iterator[ObjectInfo]:
        top = os.path.join(self.root, folder) if folder else self.root
        if os.path.realpath(top) != top.rstrip("/"):
            raise StorageError(f"{top} is a symbolic link, and so no part of the store")
        for at, folders, files in os.walk(top, onerror=_unless_gone):
            folders[:] = [name for name in folders if name != HIDDEN]
            for name in files:
                path = os.path.join(at, name)
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(path)
                    if stat.S_ISREG(found.st_mode):
                        yield ObjectInfo(os.path.relpath(path, self.root), found.st_size, _etag(found), found.st_mtime)

    def _path(self, key: str) -> str:
        """Where the object lies; raises StorageError if a symbolic link on the way leads elsewhere."""
        path = os.path.join(self.root, key)
        if os.path.realpath(os.path.dirname(path)) != os.path.dirname(path):
            raise StorageError(f"{path} leads through a symbolic link, and so out of the store")
        return path

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[int | None]:
        """A descriptor of the object's present version, or None if there is none."""
        try:
            file = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        try:
            yield file if stat.S_ISREG(os.fstat(file).st_mode) else None
        finally:
            os.close(file)

    def _describe(self, key: str, file: int) -> tuple[ObjectInfo, dict[str, str]]:
        found = os.fstat(file)
        try:
            metadata = json.loads(pathlib.Path(self._record(key, found)).read_text())
        except (FileNotFoundError, ValueError):
            metadata = {}
        return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime), metadata

    def _record(self, key: str, version: os.stat_result) -> str:
        return os.path.join(self.root, HIDDEN, "metadata", key, f"{version.st_ino:x}")

    def _forget(self, key: str, version: os.stat_result) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._record(key, version))

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        """Exclusive among all processes; the kernel releases it if the holder dies."""
        path = os.path.join(self._locks, f"{zlib.crc32(key.encode()) % LOCKS:03d}")
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            for attempt in range(LOCK_TRIES):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == LOCK_TRIES - 1:
                        raise Transient(f"another process holds the lock {path}") from None
                    time.sleep(LOCK_PAUSE_S)
            yield
        finally:
            os.close(file)

    def _sweep(self) -> None:
        """Remove what killed writers have left behind."""
        for info in self._stale():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.root, info.key))

    def _stale(self) -> Iterator[ObjectInfo]:
        if not os.path.isdir(self._temporary):
            return
        with os.scandir(self._temporary) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    if found.st_mtime < time.time() - STALE_S:
                        key = os.path.relpath(entry.path, self.root)
                        yield ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)


def _unless_gone(error: OSError) -> None:
    """A folder that cannot be read is no empty one: whoever finds no checkpoint there begins anew."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _flush(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _make_folders(folder: str, root: str) -> None:
    """Make `folder` below `root`; each new name is on disk before anything is put in it."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if folder != root:
        _make_folders(parent, root)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        _flush(parent)


@contextlib.contextmanager
def _held(path: str) -> Iterator[os.stat_result | None]:
    """The file's state, None if there is none. While it is held open its inode number, which names its record of
    metadata, is not given to another file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield os.fstat(file)
    finally:
        os.close(file)
