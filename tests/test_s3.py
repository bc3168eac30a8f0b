"""What the S3 client sends, read off the wire: encryption, credentials, addresses, certificates, parts."""

import asyncio
import contextlib
import os
import pathlib
import re
import ssl
import subprocess

import pytest

from pipeline.storage import Storage, StorageError, open_storage

IDENTITY = (
    "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>LENT</AccessKeyId>"
    "<SecretAccessKey>lent</SecretAccessKey><SessionToken>for-an-hour</SessionToken>"
    "<Expiration>2099-01-01T00:00:00Z</Expiration>"
    "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
)
ANSWERS = {
    "AssumeRoleWithWebIdentity": IDENTITY,
    "?uploads": "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
    "POST /bucket/run/file?uploadId": "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>",
}


class Endpoint:
    """Says yes to everything, or denies what lacks the header `demanded`, and keeps the heads of what it was asked."""

    def __init__(self, tls: ssl.SSLContext | None = None, demanded: str = ""):
        self.tls, self.demanded, self.heads = tls, demanded, []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0, ssl=self.tls)
        port = self.server.sockets[0].getsockname()[1]
        self.url = f"https://localhost:{port}" if self.tls else f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def _answer(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head.lower())
            await reader.readexactly(int(length[1]) if length else 0)
            self.heads.append(head)
            body = next((text for sign, text in ANSWERS.items() if sign in head), "")
            status = "200 OK"
            if self.demanded not in head:
                status, body = (
                    "403 Forbidden",
                    "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
                )
            described = 'Connection: close\r\nETag: "e"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT'
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{described}\r\n\r\n{body}".encode())
            await writer.drain()
        writer.close()

    def storage(self, endpoint: str | None = None) -> Storage:
        storage = open_storage("s3://bucket/run", endpoint or self.url)
        storage.deadline_s = 5.0
        return storage


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AWS_SERVER_SIDE_ENCRYPTION": "AES256"}, ["x-amz-server-side-encryption: AES256"]),
        (
            {
                "AWS_SERVER_SIDE_ENCRYPTION": "aws:kms",
                "AWS_SSE_KMS_KEY_ID": "arn:key",
                "AWS_SSE_BUCKET_KEY_ENABLED": "true",
            },
            [
                "x-amz-server-side-encryption: aws:kms",
                "x-amz-server-side-encryption-aws-kms-key-id: arn:key",
                "x-amz-server-side-encryption-bucket-key-enabled: true",
            ],
        ),
        ({"AWS_SESSION_TOKEN": "for-an-hour"}, ["x-amz-security-token: for-an-hour"]),
    ],
    ids=["AES256", "aws:kms", "session token"],
)
async def test_every_kind_of_write_is_sent_as_the_environment_says(monkeypatch, tmp_path, environment, expected):
    monkeypatch.setattr("pipeline.storage.s3.PART_BYTES", 100)
    (tmp_path / "file").write_bytes(bytes(150))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with Endpoint() as server:
        storage = server.storage()
        await storage.create("new", b"1")
        await storage.replace("old", b"2", '"e"')
        await storage.put_file("file", str(tmp_path / "file"))
        begun = [
            head for head in server.heads if head.startswith(("PUT /bucket/run/new", "PUT /bucket/run/old", "POST"))
        ]
        assert len(begun) == 4
        for head in begun[:3]:  # the last one completes what the third began
            assert [line for line in expected if line in head] == expected


async def test_a_denied_write_names_the_setting_that_a_bucket_which_demands_encryption_wants(monkeypatch):
    async with Endpoint(demanded="x-amz-server-side-encryption") as server:
        with pytest.raises(StorageError, match=r"access denied.*demands encryption, set AWS_SERVER_SIDE_ENCRYPTION"):
            await server.storage().put("k", b"")
        with pytest.raises(StorageError) as read:
            await server.storage().get("k")
        assert "ENCRYPTION" not in str(read.value)
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")
        server.demanded = "another header"
        with pytest.raises(StorageError) as encrypted:
            await server.storage().put("k", b"")
        assert "ENCRYPTION" not in str(encrypted.value)


async def test_a_custom_endpoint_has_the_bucket_in_its_path_or_where_asked_in_its_host(monkeypatch):
    async with Endpoint() as server:
        await server.storage().put("k", b"")
        assert server.heads[0].startswith("PUT /bucket/run/k HTTP")
        monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
        with pytest.raises(ValueError, match=r"does not begin with the bucket.*use bucket.127.0.0.1"):
            server.storage()
        server.heads.clear()
        await open_storage("s3://127/run", server.url).put("k", b"")  # 127.0.0.1 begins with this bucket
        assert server.heads[0].startswith("PUT /run/k HTTP")


def test_a_setting_that_cannot_be_is_refused_when_the_store_is_opened(monkeypatch):
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "rot13")
    with pytest.raises(ValueError, match=r"Invalid encryption type: rot13.*check the variables AWS_") as caught:
        open_storage("s3://bucket/run")
    assert "\n" not in str(caught.value)


async def test_a_file_of_any_size_goes_in_as_many_parts_as_are_allowed(monkeypatch, tmp_path):
    monkeypatch.setattr("pipeline.storage.s3.PART_BYTES", 100)
    monkeypatch.setattr("pipeline.storage.s3.MOST_PARTS", 5)
    (tmp_path / "file").write_bytes(bytes(1001))
    async with Endpoint() as server:
        await server.storage().put_file("file", str(tmp_path / "file"))
        sent = [re.search(r"content-length: (\d+)", head)[1] for head in server.heads if "partNumber" in head]
    assert sorted(map(int, sent), reverse=True) == [201, 201, 201, 201, 197]


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> pathlib.Path:
    """A folder with the certificate of an authority (ca.pem) and what it has signed for localhost (server.pem)."""
    folder = tmp_path_factory.mktemp("authority")
    make = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"]
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    ca = "-x509 -keyout ca.key -out ca.pem -subj /CN=authority -addext basicConstraints=critical,CA:TRUE"
    request = "-keyout server.key -out server.csr -subj /CN=localhost"
    signed = "-in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -extfile names"
    for command in (
        [*make, *ca.split()],
        [*make, *request.split()],
        ["openssl", "x509", "-req", *signed.split()],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def tls(authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    return context


@pytest.mark.slow
async def test_a_certificate_of_an_own_authority_is_trusted_where_it_is_named_and_else_the_setting_is_told(
    monkeypatch, authority, tls
):
    async with Endpoint(tls) as server:
        with pytest.raises(StorageError, match=r"certificate .* is refused \(UnknownIssuer\).*SSL_CERT_FILE"):
            await server.storage().put("k", b"")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
        await server.storage().put("k", b"")


@pytest.mark.slow
async def test_a_web_identity_is_changed_for_credentials_that_sign_the_requests(monkeypatch, tmp_path, authority, tls):
    (tmp_path / "token").write_text("who-I-am")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:role")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    async with Endpoint(tls) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
        await server.storage().put("k", b"")
        asked, written = server.heads[:2]
    assert "WebIdentityToken=who-I-am" in asked
    assert "RoleArn=arn%3Arole" in asked
    assert "Credential=LENT/" in written
    assert "x-amz-security-token: for-an-hour" in written
