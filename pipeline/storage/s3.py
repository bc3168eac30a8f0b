"""A bucket at an S3 endpoint, by way of obstore.

Credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; a web identity
(AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN); or the machine's role. So do encryption (AWS_SERVER_SIDE_ENCRYPTION: AES256
or aws:kms, with AWS_SSE_KMS_KEY_ID) and trust (SSL_CERT_FILE, for an authority of one's own). A custom endpoint may be
http and is addressed with the bucket in the path, or with AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true in its host name, which
then has to begin with it. obstore's own retries are off, except inside the multipart
upload of a file, whose parts may be sent twice without harm. Nothing is cached. obstore starts threads: open the
Storage in the process that uses it, and spawn, never fork, after that.
"""

import atexit
import dataclasses
import datetime
import os
import pathlib
import re
import time
import urllib.parse
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from pipeline.storage.bucket import ABSENT, Conflict, Object, ObjectInfo, StorageError, Transient, check_size

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta, PutMode
    from obstore.store import ClientConfig, RetryConfig, S3Config

T = TypeVar("T")


def _settle() -> None:
    """Let obstore's threads leave Python before the interpreter is taken down; one still in it aborts the process.

    The thread that wakes the event loop with a result needs the interpreter once more after that. A process that ends
    on this result would now and then be faster, and exit with SIGABRT instead of its code.
    """
    for _ in range(20):
        time.sleep(0.01)


atexit.register(_settle)

REQUEST_LIMIT = "30s"
CONNECT_LIMIT = "5s"
NO_RETRIES: "RetryConfig" = {"max_retries": 0}
PART_RETRIES: "RetryConfig" = {"max_retries": 6, "retry_timeout": datetime.timedelta(seconds=60)}
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
MOST_PARTS = 10_000
"""Of one upload, on Amazon S3."""
OWN_ROLE = "169.254.169.254"
"""Where a machine of Amazon's is told of its role: obstore asks there when the environment says nothing."""
NO_CREDENTIALS = (
    "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod or the machine a role "
    "(profiles in ~/.aws are not read); that of the machine could not be had"
)
NO_BUCKET = "NoSuchBucket"
HOST = re.compile(r"[A-Za-z0-9._:-]+")
DENIED = {"401", "403"}
PASSING_STATUS = {408, 409, 429}
PASSING_CODES = {"RequestTimeout", "SlowDown", "InternalError", "OperationAborted"}


class S3Bucket:
    def __init__(self, bucket: str, prefix: str, endpoint: str | None, region: str | None):
        """`endpoint`: None takes AWS_ENDPOINT_URL or AWS itself; `region`: None takes AWS_REGION or us-east-1.

        Raises ValueError for a setting of the environment that cannot be.
        """
        self.name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        source = "as configured"
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if not endpoint and os.environ.get(name):
                endpoint, source = os.environ[name], f"as {name} says"
        if endpoint:
            _check_endpoint(endpoint, source)
        _check_style(bucket, endpoint)
        self._where = f"endpoint {endpoint}, {source}," if endpoint else "Amazon S3"
        client: ClientConfig = {
            "allow_http": (endpoint or "").startswith("http://"),
            "timeout": REQUEST_LIMIT,
            "connect_timeout": CONNECT_LIMIT,
        }
        place: S3Config = {"checksum_algorithm": "SHA256"}
        if endpoint:
            place["endpoint"] = endpoint
        if region:
            place["region"] = region

        def store(retries: "RetryConfig") -> S3Store:
            return S3Store(bucket, prefix=prefix or None, config=place, client_options=client, retry_config=retries)

        try:
            self._store, self._patient_store = store(NO_RETRIES), store(PART_RETRIES)
        except BaseError as error:
            raise ValueError(
                f"{self.name}: {_reason(str(error))}; check the variables AWS_* of the environment"
            ) from None

    async def read(self, key: str) -> Object | None:
        async def attempt() -> Object:
            result = await obstore.get_async(self._store, key)
            info, metadata = _info(key, result.meta), _metadata(result.attributes)
            check_size(self.name, info, metadata)
            return Object(info, bytes(await result.bytes_async()), metadata)

        return await self._missing(key, attempt())

    async def read_range(self, key: str, start: int, stop: int, etag: str) -> bytes:
        async def attempt() -> bytes:
            result = await obstore.get_async(self._store, key, options={"range": (start, stop), "if_match": etag})
            return bytes(await result.bytes_async())

        data = await self._missing(key, attempt())
        if data is None:
            raise Conflict(f"{self.name}/{key} has gone while it was read")
        if len(data) != stop - start:
            raise Transient(f"{len(data)} bytes came instead of {stop - start}")
        return data

    async def stat(self, key: str) -> tuple[ObjectInfo, dict[str, str]] | None:
        async def attempt() -> tuple[ObjectInfo, dict[str, str]]:
            result = await obstore.get_async(self._store, key, options={"head": True})
            return _info(key, result.meta), _metadata(result.attributes)

        return await self._missing(key, attempt())

    async def write(self, key: str, data: bytes, metadata: dict[str, str], condition: str | None) -> ObjectInfo:
        mode: PutMode = "overwrite" if condition is None else {"e_tag": condition}
        if condition == ABSENT:
            mode = "create"
        attributes: Attributes = {**metadata}
        result = await self._call(
            key,
            obstore.put_async(self._store, key, data, mode=mode, attributes=attributes, use_multipart=False),
            writes=True,
        )
        # Somebody else may have written since: the etag must be that of this very write, or If-Match fences nobody.
        return dataclasses.replace(await self._written(key), size=len(data), etag=result["e_tag"] or "")

    async def upload(self, key: str, path: str, metadata: dict[str, str]) -> ObjectInfo:
        attributes: Attributes = {**metadata}
        sent = await self._missing(
            key,
            obstore.put_async(
                self._patient_store,
                key,
                pathlib.Path(path),
                attributes=attributes,
                chunk_size=max(PART_BYTES, -(-os.path.getsize(path) // MOST_PARTS)),
                max_concurrency=PARTS_AT_ONCE,
            ),
        )
        if sent is None:  # also the answer to a second try to complete it, where that of the first was lost
            raise Transient(f"the upload of {key} is not known to the server any more")
        return await self._written(key)

    async def list(self, folder: str) -> list[ObjectInfo]:
        found = await self._call(folder, obstore.list(self._store, prefix=folder or None).collect_async())
        return [_info(meta["path"], meta) for meta in found if meta["path"]]  # consoles put one there for the folder

    async def delete(self, key: str) -> None:
        await self._missing(key, obstore.delete_async(self._store, key))

    async def _written(self, key: str) -> ObjectInfo:
        """What a write made: a PUT's response has no LastModified, and the protocol tells time by it."""
        found = await self.stat(key)
        if found is None:
            raise Transient(f"{key} is not there after it was written")
        return found[0]

    async def _missing(self, key: str, call: Awaitable[T]) -> T | None:
        """The call's answer, or None for a missing key."""
        try:
            return await self._call(key, call)
        except FileNotFoundError:
            return None

    async def _call(self, key: str, call: Awaitable[T], writes: bool = False) -> T:
        """The call's answer, obstore's exceptions told apart."""
        try:
            return await call
        except (AlreadyExistsError, PreconditionError):
            raise Conflict(f"{self.name}/{key} was written by somebody else") from None
        except FileNotFoundError as error:
            if NO_BUCKET not in str(error):
                raise
            raise self._fault(key, str(error), writes) from None
        except BaseError as error:
            raise self._fault(key, str(error), writes) from None

    def _fault(self, key: str, text: str, writes: bool) -> StorageError:
        """What obstore's words mean. Its classes do not tell: those of a listing's faults are all one."""
        place, reason = f"{self.name}/{key}".rstrip("/"), _reason(text)
        status = re.search(r"status code: (\d{3})", text)
        if NO_BUCKET in text:
            return StorageError(f"bucket {self._bucket} of {self.name} does not exist")
        if fault := re.search(r"InvalidCertificate\(\s*(\w+)", text):
            return StorageError(
                f"{self.name}: the certificate of its endpoint is refused ({fault[1]}); if an authority of your own "
                "has signed it, name the file with its certificate in SSL_CERT_FILE"
            )
        if re.search(r"InvalidMessage\(\s*InvalidContentType", text):
            return StorageError(f"{self.name}: {self._where} does not speak TLS: write http:// instead of https://")
        if "invalid path" in text:
            return StorageError(
                f"{self.name} holds an object that keeps it from being listed ({reason}): delete that object"
            )
        kind = Transient if _passing(text) else StorageError
        if OWN_ROLE in text:
            return kind(f"{self.name}: {NO_CREDENTIALS}: {reason}")
        if kind is StorageError and status and status[1] in DENIED:
            return StorageError(f"{place}: access denied ({reason}); {_remedy(reason, writes)}")
        silent = f"{self._where} does not answer: " if kind is Transient and status is None else ""
        return kind(f"{place}: {silent}{reason}")


def _remedy(reason: str, writes: bool) -> str:
    if "Skewed" in reason:
        return "set the clock of this machine"
    remedy = "check the credentials and their policy"
    if writes and reason.startswith("AccessDenied") and not os.environ.get("AWS_SERVER_SIDE_ENCRYPTION"):
        remedy += "; if that of the bucket demands encryption, set AWS_SERVER_SIDE_ENCRYPTION (AES256 or aws:kms)"
    return remedy


def _check_endpoint(endpoint: str, source: str) -> None:
    try:
        parts = urllib.parse.urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and parts.port != 0 and HOST.fullmatch(parts.hostname or "")
    except ValueError:  # the port
        good = None
    if not good:
        raise ValueError(f"endpoint {endpoint}, {source}, is no URL: write one, such as http://localhost:8333")


def _check_style(bucket: str, endpoint: str | None) -> None:
    virtual = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() == "true"
    host = urllib.parse.urlsplit(endpoint or "").hostname
    if virtual and host and not host.startswith(f"{bucket.lower()}."):
        raise ValueError(
            f"endpoint {endpoint} does not begin with the bucket, as AWS_VIRTUAL_HOSTED_STYLE_REQUEST asks: use "
            f"{bucket}.{host}, or unset the variable"
        )


def _info(key: str, meta: "ObjectMeta") -> ObjectInfo:
    return ObjectInfo(key, meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())


def _metadata(attributes: "Attributes") -> dict[str, str]:
    """The metadata a writer gave: standard HTTP attributes are spelled with capitals, these are not."""
    return {name: value for name, value in attributes.items() if name.islower()}


def _passing(text: str) -> bool:
    """Whether another try may succeed: all but a definite answer of the server (obstore tells it in words only)."""
    status = re.search(r"status code: (\d{3})", text)
    if status is None:
        return "incorrectly configured region" not in text
    code = re.search(r"<Code>(\w+)</Code>", text)
    number = int(status[1])
    return (
        number in PASSING_STATUS or (number >= 500 and number != 501) or (code is not None and code[1] in PASSING_CODES)
    )


def _reason(text: str) -> str:
    """The telling part of obstore's many lines."""
    if answer := re.search(r"<Code>(\w+)</Code>.*?<Message>(.*?)</Message>", text, re.DOTALL):
        return f"{answer[1]}: {answer[2]}"
    causes = re.findall(r'(?:message|error): "([^"]+)"', text)
    if "kind: Timeout" in text:
        causes.append(f"no answer within {REQUEST_LIMIT}")
    return causes[-1] if causes else text.split("\n", 1)[0]
