"""Opens buckets (S3, Google Cloud Storage) and web servers for libcurl (:mod:`gpuaug.source.remote.curl`).

The endpoint and the credentials come from the fsspec file system.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from gpuaug.source.remote.curl import Curl, Login
from gpuaug.source.remote.filesystem import UNUSED

log = logging.getLogger("gpuaug")

TIMEOUT_S = 60.0  # longest wait for credentials, or for the region of a bucket
LOGIN_KEPT_S, RENEWED_S = 60.0, 300.0  # a login is renewed after 60 s, or 300 s before it expires
LOGIN_RETRY_S = 5.0  # pause after a failed login
# options that libcurl supports, or that do not matter for libcurl
S3 = UNUSED | {"anon", "endpoint_url", "key", "secret", "token", "username", "password", "use_ssl", "client_kwargs"}
S3 |= {"requester_pays", "config_kwargs", "session", "profile"}
S3_CLIENT = {"region_name", "endpoint_url", "use_ssl", "verify"}
S3_CLIENT |= {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
S3_CONFIG = {"max_pool_connections", "retries", "s3"}
GCS = UNUSED | {"project", "access", "token", "endpoint_url", "consistency", "timeout"}
LIBCURL = 0x080400  # 8.4, the first version that limits the size of answers without Content-Length
SPECIAL = re.compile(r"--[a-z]+-s3$|-s3alias$")  # directory buckets and access points
AMAZON = re.compile(r"https?://s3(?:\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?/?")


class Objects(NamedTuple):
    """The objects of a bucket, or of a web server."""

    curl: Curl
    url: Callable[[str], str | None]  # converts a user's URL to the URL to request; None: only fsspec can read the key


def _of_key(root: str, *, safe: str, end: str = "") -> Callable[[str], str | None]:
    """The function for `Objects.url`. HTTP clients would change keys such as ``a/../b``, so these keys give None."""

    def url(user_url: str) -> str | None:
        key = user_url.split("://", 1)[1].partition("/")[2]
        if not key or not {"", ".", ".."}.isdisjoint(key.split("/")):
            return None
        try:
            return root + quote(key, safe=safe) + end
        except UnicodeEncodeError:
            return None

    return url


def open_objects(system: Any, url: str, *, connections: int) -> Objects | None:
    """Open the bucket of a URL with the settings of fsspec's ``system``; None if libcurl cannot read the bucket."""
    scheme, rest = url.split("://", 1)
    bucket = rest.split("/", 1)[0]
    make = {"s3": _s3, "s3a": _s3, "gs": _gcs, "gcs": _gcs, "http": _http, "https": _http}.get(scheme)
    if make is None:
        return None
    try:
        _check_libcurl()
        return make(system, bucket, connections)
    except _UnfitError as reason:
        log.info("source: %s://%s is read by %s, not libcurl: %s", scheme, bucket, type(system).__name__, reason)
        return None


def _check_libcurl() -> None:
    try:
        import pycurl
    except ImportError as error:
        raise _UnfitError("pycurl is not installed. For faster reads, `pip install pycurl`") from error
    if pycurl.version_info()[2] < LIBCURL or not hasattr(pycurl, "AWS_SIGV4"):
        raise _UnfitError("libcurl is older than 8.4")


class _UnfitError(Exception):
    """Libcurl cannot read this bucket."""


class _RenewedLogin:
    """Keeps a login, and renews the login before it expires. ``ask`` returns a login and its expiry time."""

    def __init__(self, ask: Callable[[], tuple[Login, datetime | None]]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._until = 0.0
        self._login: Login | Exception = Login()

    def __call__(self) -> Login:
        with self._lock:
            if time.time() >= self._until:
                try:
                    self._login, end = self._ask()
                except Exception as error:  # botocore and google.auth may raise any exception
                    self._login, self._until = error, time.time() + LOGIN_RETRY_S
                    raise
                now = time.time()
                self._until = now + LOGIN_KEPT_S
                if end is not None:  # near its expiry, a login is renewed every second
                    self._until = min(self._until, max(now + 1, end.timestamp() - RENEWED_S))
            if isinstance(self._login, Exception):
                raise self._login
            return self._login


def _check(options: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(key for key, value in options.items() if key not in known and value not in (None, False, {})):
        raise _UnfitError(f"unsupported option {', '.join(unknown)}")


def _s3(system: Any, bucket: str, connections: int) -> Objects:
    import pycurl

    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket) or SPECIAL.search(bucket):
        raise _UnfitError("unsupported access point or directory bucket")
    _check(system.storage_options, S3)
    _check(system.client_kwargs, S3_CLIENT)
    _check(system.config_kwargs, S3_CONFIG)
    _check(system.config_kwargs.get("s3") or {}, {"addressing_style"})

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, system.loop).result(TIMEOUT_S)

    client = wait(system.set_session())
    endpoint, region = client.meta.endpoint_url.rstrip("/"), client.meta.region_name or "us-east-1"
    style = (client.meta.config.s3 or {}).get("addressing_style")
    if amazon := AMAZON.fullmatch(endpoint):
        region = _region(wait, client, bucket) or region
        endpoint = f"https://s3.{region}.amazonaws.com{amazon[1] or ''}"
    elif "amazonaws.com" in endpoint:
        raise _UnfitError(f"unsupported endpoint {endpoint}")
    # As in botocore, a bucket name with dots is never in the host name, because certificates would not match.
    virtual = style == "virtual" and "." not in bucket and not re.search(r"//(\[|[\d.]+(:|/|$))", endpoint)
    root = endpoint.replace("://", f"://{bucket}.", 1) if virtual else f"{endpoint}/{bucket}"
    lines = ("x-amz-request-payer: requester",) if system.requester_pays else ()
    verify = system.client_kwargs.get("verify")
    options = _trust(system.session.get_config_variable("ca_bundle") if verify is None else verify)
    if system.anon:
        curl = Curl(connections=connections, login=lambda: Login(lines), options=options)
    else:
        credentials = client._request_signer._credentials
        if credentials is None:
            raise _UnfitError("no credentials")  # s3fs then raises an error that lists where credentials can be

        def ask() -> tuple[Login, datetime | None]:
            frozen = wait(credentials.get_frozen_credentials())
            token = (f"x-amz-security-token: {frozen.token}",) if frozen.token else ()
            expiry = getattr(credentials, "_expiry_time", None)
            return Login((*lines, *token), frozen.access_key, frozen.secret_key), expiry

        options[pycurl.AWS_SIGV4] = f"aws:amz:{region}:s3"
        curl = Curl(connections=connections, login=_RenewedLogin(ask), options=options)
    return Objects(curl, _of_key(f"{root}/", safe="/~"))


def _trust(verify: Any) -> dict[int, Any]:
    """Options for libcurl to trust the same certificates as botocore."""
    import pycurl
    from botocore.httpsession import get_cert_path

    if verify is False:
        return {pycurl.SSL_VERIFYPEER: 0, pycurl.SSL_VERIFYHOST: 0}
    return {pycurl.CAINFO: verify if isinstance(verify, str) else get_cert_path(True)}


def _system_trust() -> dict[int, Any]:
    """Options to trust this system's certificates. The OpenSSL inside pycurl looks for them in other folders."""
    import pycurl

    known = ssl.get_default_verify_paths()
    if known.cafile is not None:
        return {pycurl.CAINFO: known.cafile}
    if known.capath is not None and os.listdir(known.capath):
        return {pycurl.CAPATH: known.capath}
    try:
        import certifi
    except ImportError:
        return {}
    return {pycurl.CAINFO: certifi.where()}


def _region(wait: Callable[[Any], Any], client: Any, bucket: str) -> str | None:
    """The region of a bucket. The server sends the region even if it denies access."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = wait(client.head_bucket(Bucket=bucket))
    except ClientError as error:
        answer = error.response
    except (BotoCoreError, TimeoutError) as error:
        raise _UnfitError(f"unknown region of the bucket ({error!r})") from error
    return answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")


def _gcs(system: Any, bucket: str, connections: int) -> Objects:
    from google.auth.credentials import AnonymousCredentials

    _check(system.storage_options, GCS)
    known = system.credentials

    def ask() -> tuple[Login, datetime | None]:
        if known.credentials is None or isinstance(known.credentials, AnonymousCredentials):
            return Login(), None
        known.maybe_refresh()
        until = known.credentials.expiry
        end = None if until is None else until.replace(tzinfo=UTC)
        lines: dict[str, str] = {}
        known.apply(lines)
        return Login(tuple(f"{name}: {value}" for name, value in lines.items())), end

    root = f"{system._location.rstrip('/')}/download/storage/v1/b/{quote(bucket, safe='')}/o/"
    curl = Curl(connections=connections, login=_RenewedLogin(ask), options=_system_trust())
    return Objects(curl, _of_key(root, safe="", end="?alt=media"))


def _http(system: Any, server: str, connections: int) -> Objects:
    import pycurl
    from fsspec.implementations.http import get_client

    if system.client_kwargs or system.get_client is not get_client or set(system.kwargs) - UNUSED - {"headers"}:
        raise _UnfitError("unsupported options of aiohttp")
    lines = {k: v for k, v in (system.kwargs.get("headers") or {}).items() if k.lower() != "accept-encoding"}
    login = Login(("Accept-Encoding: identity", *(f"{name}: {value}" for name, value in lines.items())))
    options = {**_system_trust(), pycurl.FOLLOWLOCATION: 1, pycurl.MAXREDIRS: 5}
    curl = Curl(connections=connections, login=lambda: login, options=options, encoded=False)

    def url(user_url: str) -> str | None:
        try:
            return str(system.encode_url(user_url))
        except ValueError:
            return None

    return Objects(curl, url)
