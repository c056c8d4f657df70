"""Objects of S3 and of Google Cloud Storage, for a tenth of the processor time of s3fs.

Plain reads of S3 go over :mod:`gpuaug.source.wire`, everything else through obstore. What to ask, where and as whom
stays with the file system of fsspec. obstore's threads do not live on in a forked child, where its calls would wait for
ever: only processes that fork nothing use it, the workers.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import logging
import math
import multiprocessing
import os
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from gpuaug.source.wire import Get, OddError, StatusError, Wire, host_of

log = logging.getLogger("gpuaug")

PATIENCE = 60.0  # seconds for credentials, and for the region of a bucket
LOGIN, EXPIRING = 60.0, 300.0  # seconds that credentials are kept, and before their end that they are asked for anew
NOTHING = hashlib.sha256().hexdigest()  # of a request without a body
UNUSED = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"}
UNUSED |= {"default_block_size", "default_fill_cache", "default_cache_type", "cache_regions", "max_concurrency"}
UNUSED |= {"fixed_upload_size", "local_expiry_check", "block_size", "cache_timeout", "check_connection"}
S3 = UNUSED | {"anon", "endpoint_url", "key", "secret", "token", "username", "password", "use_ssl", "client_kwargs"}
S3 |= {"requester_pays", "config_kwargs", "session", "profile"}
S3_CLIENT = {"region_name", "endpoint_url", "use_ssl", "verify"}
S3_CLIENT |= {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
S3_CONFIG = {"max_pool_connections", "retries", "s3"}
GCS = UNUSED | {"project", "access", "token", "endpoint_url", "consistency", "timeout"}
GOOGLE = "https://storage.googleapis.com"  # others do not send what obstore asks of Google
AMAZON = re.compile(r"https?://s3(?:\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?/?")

_lost = False  # whether a parent of this process had obstore's threads when it forked


class Objects:
    """Reads ranges of the objects in one bucket, from any thread.

    Args:
        make: gives obstore's store for a bound of seconds on one request.
        seconds: of a request for up to a megabyte.
        wire: for plain reads; None: obstore reads all.
        root: path of the bucket over that.
    """

    def __init__(
        self, make: Callable[[float], Any], seconds: float, *, wire: Wire | None = None, root: str = ""
    ) -> None:
        self._make, self._seconds = make, seconds
        self.wire, self._root = wire, root
        self._lock = threading.Lock()
        self._stores: dict[float, Any] = {}

    def get(self, key: str, begin: int, size: int | None, *, most: int, seconds: float) -> Get | None:
        """What to ask the wire for; None for a key or a range that it cannot ask for."""
        plain = "//" not in key and not key.startswith("/") and all(part not in (".", "..") for part in key.split("/"))
        if self.wire is None or not key or not plain or (size is None and begin):
            return None
        try:
            return Get(self._root + quote(key, safe="/~"), begin, size, most, seconds)
        except UnicodeEncodeError:
            return None

    def read(self, key: str, begin: int, size: int | None, *, most: int, seconds: float) -> bytes:
        """``size`` bytes from ``begin`` on, fewer where the object ends; None: a whole object of at most ``most``.

        Raises:
            OSError: FileNotFoundError, PermissionError, TimeoutError after ``seconds``, or one of the key or the size.
            StatusError: whatever else the server or the way to it did.
        """
        from obstore import exceptions

        try:
            store = self._store(seconds)
            if size is not None:
                return bytes(store.get_range(key, start=begin, length=size))
            answer = store.get(key)
            begin, end = answer.range
            if end - begin > most:
                raise OSError(errno.EFBIG, f"{end - begin} bytes, more than {most}", key)
            return bytes(answer.bytes())
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "no such object", key) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, _brief(error), key) from error
        except exceptions.BaseError as error:
            if "TimedOut" in str(error) or "kind: Timeout" in str(error):
                raise TimeoutError(errno.ETIMEDOUT, "no answer in time", key) from error
            found = re.search(r"status code: (\d{3})", str(error))
            raise StatusError(_brief(error), int(found[1]) if found else 0) from error
        except ValueError as error:
            raise OSError(errno.EINVAL, f"no key that can be asked for ({error})", key) from error

    def _store(self, seconds: float) -> Any:
        """One store for all small requests, as connections belong to it; others by powers of two of their seconds."""
        more = seconds - self._seconds
        bound = self._seconds + (2.0 ** math.ceil(math.log2(more)) if more > 1 else max(0, math.ceil(more)))
        with self._lock:
            if bound not in self._stores:
                self._stores[bound] = self._make(bound)
            return self._stores[bound]


def _brief(error: Exception) -> str:
    """What obstore says, without the state of its client."""
    said, _, source = str(error).partition("\n\nDebug source")
    cause = re.search(r'message: "([^"]+)"', source)
    return " ".join(said.split())[:300] + (f" ({cause[1]})" if cause else "")


def opened(system: Any, place: str, *, timeout: float, connections: int) -> Objects | None:
    """The bucket of a URL, asked as fsspec's ``system`` would; None where it has to be asked through that.

    That is: in a process that may fork, for other stores, and for options that obstore does not have.
    """
    scheme, rest = place.split("://", 1)
    make = {"s3": _s3, "s3a": _s3, "gs": _gcs, "gcs": _gcs}.get(scheme)
    if make is None or not _alone():
        return None
    try:
        import obstore  # noqa: F401
    except ImportError:
        log.info("source: %s:// is read by %s; `pip install obstore` reads faster", scheme, type(system).__name__)
        return None
    bucket = rest.split("/", 1)[0]
    try:
        return make(system, bucket, timeout, connections)
    except _UnfitError as reason:
        log.info("source: %s://%s is read by %s, as obstore has no %s", scheme, bucket, type(system).__name__, reason)
        return None


class _UnfitError(Exception):
    """What obstore cannot be told."""


def _alone() -> bool:
    """Whether this process will have no forked children, and has no parent that used obstore."""
    return multiprocessing.current_process().daemon and not _lost


def _before_fork() -> None:
    global _lost
    if "obstore" in sys.modules:
        try:
            names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        except OSError:
            names = []
        _lost = _lost or not names or any(name.startswith("tokio") for name in names)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _check(options: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(key for key, value in options.items() if key not in known and value not in (None, False, {})):
        raise _UnfitError(f"option {', '.join(unknown)}")


def _client(timeout: float) -> Any:
    bound = f"{math.ceil(1000 * timeout)}ms"
    return {"timeout": bound, "connect_timeout": bound, "allow_http": True}


def _s3(system: Any, bucket: str, timeout: float, connections: int) -> Objects:
    """As s3fs and botocore find it: options, fsspec's configuration, environment, AWS's files, roles."""
    from obstore.store import S3Store

    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket):
        raise _UnfitError("access points")
    _check(system.storage_options, S3)
    _check(system.client_kwargs, S3_CLIENT)
    _check(system.config_kwargs, S3_CONFIG)
    _check(system.config_kwargs.get("s3") or {}, {"addressing_style"})

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, system.loop).result(PATIENCE)

    client = wait(system.set_session())
    endpoint, region = client.meta.endpoint_url.rstrip("/"), client.meta.region_name or "us-east-1"
    style = (client.meta.config.s3 or {}).get("addressing_style")
    if amazon := AMAZON.fullmatch(endpoint):
        region = _region(wait, client, bucket) or region
        endpoint = f"https://s3.{region}.amazonaws.com{amazon[1] or ''}"
    elif "amazonaws.com" in endpoint:
        raise _UnfitError(f"endpoint {endpoint}")
    if style == "virtual":
        endpoint = endpoint.replace("://", f"://{bucket}.", 1)
    more: dict[str, Any] = {"skip_signature": True}
    lines = {"x-amz-request-payer": "requester"} if system.requester_pays else {}
    headers: Callable[[str], str] = _Lines(lines)
    if not system.anon:
        credentials = client._request_signer._credentials  # of the options, or of botocore's usual places
        if credentials is None:
            raise _UnfitError("credentials")  # s3fs says what it looked for

        def provide() -> dict[str, Any]:
            frozen = wait(credentials.get_frozen_credentials())
            until = getattr(credentials, "_expiry_time", None)
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": until.astimezone(UTC) if until is not None else None,
            }

        provide()  # what is wrong with them is said here, and by botocore
        more = {"skip_signature": False, "credential_provider": provide}
        headers = _Signed(host_of(endpoint), region, provide, lines)
    trust: dict[str, Any] = {}
    verify = system.client_kwargs.get("verify")
    authorities = verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE")
    if verify is False:
        trust = {"allow_invalid_certificates": True}
    elif authorities:
        trust = {"root_certificate": Path(authorities).read_bytes()}

    def options(seconds: float) -> Any:
        return {**_client(seconds), **trust}

    def make(seconds: float) -> Any:
        return S3Store(
            bucket,
            aws_endpoint_url_s3=endpoint,
            region=region,
            virtual_hosted_style_request=style == "virtual",
            request_payer=bool(system.requester_pays),
            client_options=options(seconds),
            retry_config={"max_retries": 0},  # ours are counted
            **more,
        )

    root = urlsplit(endpoint).path + ("" if style == "virtual" else f"/{bucket}") + "/"
    try:
        wire = Wire(endpoint, headers=headers, connections=connections, context=_context(verify, authorities))
    except (OddError, OSError) as reason:  # no such file of authorities
        log.info("source: s3://%s is read through obstore alone: %s", bucket, reason)
        wire = None
    return Objects(make, timeout, wire=wire, root=root)


def _context(verify: Any, authorities: str | None) -> ssl.SSLContext:
    """Whom botocore would trust."""
    from botocore.httpsession import get_cert_path

    context = ssl.create_default_context(cafile=authorities or get_cert_path(True))
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Lines:
    """The same lines in the head of every request."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def __call__(self, path: str) -> str:
        return self._lines


class _Signed:
    """Signature version 4 of a GET without query, for what botocore takes 60 us and more.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """

    def __init__(self, host: str, region: str, provide: Callable[[], Mapping[str, Any]], lines: Mapping[str, str]):
        self._host, self._region, self._provide, self._more = host, region, provide, lines
        self._lock = threading.Lock()
        self._until = 0.0  # when credentials are asked for again
        self._second = 0

    def __call__(self, path: str) -> str:
        with self._lock:
            now = time.time()
            if int(now) != self._second:
                self._renew(now)
            request = hashlib.sha256(f"GET\n{path}{self._request}".encode()).hexdigest()
            return self._lines + hmac.digest(self._key, (self._scope + request).encode(), "sha256").hex() + "\r\n"

    def _renew(self, now: float) -> None:
        """All that is the same within a second."""
        if now >= self._until:
            try:
                self._login = self._provide()
            except Exception as error:  # whatever a source of credentials raises; obstore asks it again, and says so
                raise OddError(f"no credentials: {error}") from error
            end = self._login["expires_at"]
            self._until = now + LOGIN if end is None else min(now + LOGIN, end.timestamp() - EXPIRING)
        stamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y%m%dT%H%M%SZ")
        lines = {"host": self._host, "x-amz-content-sha256": NOTHING, "x-amz-date": stamp, **self._more}
        if self._login["token"]:
            lines["x-amz-security-token"] = self._login["token"]
        lines = dict(sorted(lines.items()))
        signed = ";".join(lines)
        self._request = "\n\n" + "".join(f"{k}:{v}\n" for k, v in lines.items()) + f"\n{signed}\n{NOTHING}"
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        self._scope = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n"
        key = b"AWS4" + self._login["secret_access_key"].encode()
        for word in scope.split("/"):
            key = hmac.digest(key, word.encode(), "sha256")
        self._key = key
        del lines["host"]
        self._lines = "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + (
            f"Authorization: AWS4-HMAC-SHA256 Credential={self._login['access_key_id']}/{scope}, "
            f"SignedHeaders={signed}, Signature="
        )
        self._second = int(now)


def _region(wait: Callable[[Any], Any], client: Any, bucket: str) -> str | None:
    """Of a bucket, as its server says; also where it refuses everything else."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = wait(client.head_bucket(Bucket=bucket))
    except ClientError as error:
        answer = error.response
    except (BotoCoreError, TimeoutError):
        return None
    return answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")


def _gcs(system: Any, bucket: str, timeout: float, connections: int) -> Objects:
    """As gcsfs and google.auth find it: options, fsspec's configuration, environment, Google's files."""
    from obstore.store import GCSStore

    _check(system.storage_options, GCS)
    if (endpoint := system._location.rstrip("/")) != GOOGLE:
        raise _UnfitError(f"endpoint {endpoint} for Google's protocol")
    login = system.credentials
    more: dict[str, Any] = {"skip_signature": True}
    if login.credentials is not None and not isinstance(login.credentials, _anonymous()):

        def provide() -> dict[str, Any]:
            login.maybe_refresh()
            until = login.credentials.expiry
            return {
                "token": login.credentials.token,
                "expires_at": None if until is None else until.replace(tzinfo=UTC),
            }

        provide()
        more = {"skip_signature": False, "credential_provider": provide}

    def make(seconds: float) -> Any:
        return GCSStore(
            bucket, base_url=endpoint, client_options=_client(seconds), retry_config={"max_retries": 0}, **more
        )

    return Objects(make, timeout)


def _anonymous() -> type:
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials
