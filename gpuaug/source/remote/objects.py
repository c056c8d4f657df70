"""Objects of S3, of Google Cloud Storage and of web servers, read by libcurl (:mod:`gpuaug.source.remote.curl`).

Where they are and as whom to ask stays with the file system of fsspec, which also lists, and reads what is told it in
options that libcurl does not have.
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
from typing import Any
from urllib.parse import quote

from gpuaug.source.remote.curl import Curl, Get, Login

log = logging.getLogger("gpuaug")

PATIENCE = 60.0  # seconds for credentials, and for the region of a bucket
KEPT, EXPIRING = 60.0, 300.0  # seconds that a login is kept, and before its end that it is asked for anew
UNUSED = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "asynchronous", "loop"}
UNUSED |= {"default_block_size", "default_fill_cache", "default_cache_type", "cache_regions", "max_concurrency"}
UNUSED |= {"fixed_upload_size", "local_expiry_check", "block_size", "cache_timeout", "check_connection"}
S3 = UNUSED | {"anon", "endpoint_url", "key", "secret", "token", "username", "password", "use_ssl", "client_kwargs"}
S3 |= {"requester_pays", "config_kwargs", "session", "profile"}
S3_CLIENT = {"region_name", "endpoint_url", "use_ssl", "verify"}
S3_CLIENT |= {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
S3_CONFIG = {"max_pool_connections", "retries", "s3"}
GCS = UNUSED | {"project", "access", "token", "endpoint_url", "consistency", "timeout"}
LIBCURL = 0x080400  # its first version that bounds what is sent without a stated length
FAILED = 5.0  # seconds until a login that failed is tried again
SPECIAL = re.compile(r"--[a-z]+-s3$|-s3alias$")  # buckets with protocols of their own
AMAZON = re.compile(r"https?://s3(?:\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?/?")


class Objects:
    """The objects of one bucket, or of one server.

    Args:
        curl: asks for them.
        url: what to ask for, of a place; None for one that HTTP clients take for another.
    """

    def __init__(self, curl: Curl, url: Callable[[str], str | None]) -> None:
        self.curl, self._url = curl, url

    def get(self, place: str, begin: int, size: int | None, *, most: int, seconds: float) -> Get | None:
        """What to ask for; None for a place that HTTP clients take for another one."""
        url = self._url(place)
        return None if url is None else Get(url, begin, size, most, seconds)


def _of_key(root: str, *, safe: str, end: str = "") -> Callable[[str], str | None]:
    """URL of the key in a place, between what stands before it and behind it."""

    def url(place: str) -> str | None:
        key = place.split("://", 1)[1].partition("/")[2]
        if not key or not {"", ".", ".."}.isdisjoint(key.split("/")):
            return None
        try:
            return root + quote(key, safe=safe) + end
        except UnicodeEncodeError:
            return None

    return url


def opened(system: Any, place: str, *, connections: int) -> Objects | None:
    """The bucket of a URL, asked as fsspec's ``system`` would; None where it has to be asked through that.

    That is: for other stores, for options that libcurl does not have, and without pycurl.
    """
    scheme, rest = place.split("://", 1)
    make = {"s3": _s3, "s3a": _s3, "gs": _gcs, "gcs": _gcs, "http": _http, "https": _http}.get(scheme)
    if make is None:
        return None
    try:
        import pycurl
    except ImportError:
        log.info("source: %s:// is read by %s; `pip install pycurl` reads faster", scheme, type(system).__name__)
        return None
    if pycurl.version_info()[2] < LIBCURL or not hasattr(pycurl, "AWS_SIGV4"):
        log.info("source: %s:// is read by %s, as libcurl is older than 8.4", scheme, type(system).__name__)
        return None
    bucket = rest.split("/", 1)[0]
    try:
        return make(system, bucket, connections)
    except _UnfitError as reason:
        log.info("source: %s://%s is read by %s, as libcurl has no %s", scheme, bucket, type(system).__name__, reason)
        return None


class _UnfitError(Exception):
    """What libcurl cannot be told."""


class _Kept:
    """A login that is asked for anew when it is old.

    Args:
        ask: gives it, and when it ends.
    """

    def __init__(self, ask: Callable[[], tuple[Login, datetime | None]]) -> None:
        self._ask, self._lock = ask, threading.Lock()
        self._until = 0.0
        self._login: Login | Exception = Login()

    def __call__(self) -> Login:
        with self._lock:
            if time.time() >= self._until:
                try:
                    self._login, end = self._ask()
                except Exception as error:  # whatever botocore's and google.auth's sources raise
                    self._login, self._until = error, time.time() + FAILED
                    raise
                # one that is about to end is asked for every second
                now = time.time()
                self._until = now + KEPT if end is None else min(now + KEPT, max(now + 1, end.timestamp() - EXPIRING))
            if isinstance(self._login, Exception):
                raise self._login
            return self._login


def _check(options: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(key for key, value in options.items() if key not in known and value not in (None, False, {})):
        raise _UnfitError(f"option {', '.join(unknown)}")


def _s3(system: Any, bucket: str, connections: int) -> Objects:
    """As s3fs and botocore find it: options, fsspec's configuration, environment, AWS's files, roles."""
    import pycurl

    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket) or SPECIAL.search(bucket):
        raise _UnfitError("access points and directory buckets")
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
    # as botocore: no certificate fits a bucket with dots, and an address has no names below it
    virtual = style == "virtual" and "." not in bucket and not re.search(r"//(\[|[\d.]+(:|/|$))", endpoint)
    root = endpoint.replace("://", f"://{bucket}.", 1) if virtual else f"{endpoint}/{bucket}"
    lines = ("x-amz-request-payer: requester",) if system.requester_pays else ()
    verify = system.client_kwargs.get("verify")
    options = _trust(system.session.get_config_variable("ca_bundle") if verify is None else verify)
    if system.anon:
        curl = Curl(connections=connections, login=lambda: Login(lines), options=options)
    else:
        credentials = client._request_signer._credentials  # of the options, or of botocore's usual places
        if credentials is None:
            raise _UnfitError("credentials")  # s3fs says what it looked for

        def ask() -> tuple[Login, datetime | None]:
            frozen = wait(credentials.get_frozen_credentials())
            token = (f"x-amz-security-token: {frozen.token}",) if frozen.token else ()
            return Login((*lines, *token), frozen.access_key, frozen.secret_key), getattr(
                credentials, "_expiry_time", None
            )

        options[pycurl.AWS_SIGV4] = f"aws:amz:{region}:s3"
        curl = Curl(connections=connections, login=_Kept(ask), options=options)
    return Objects(curl, _of_key(f"{root}/", safe="/~"))


def _trust(verify: Any) -> dict[int, Any]:
    """Whom botocore would trust."""
    import pycurl
    from botocore.httpsession import get_cert_path

    if verify is False:
        return {pycurl.SSL_VERIFYPEER: 0, pycurl.SSL_VERIFYHOST: 0}
    return {pycurl.CAINFO: verify if isinstance(verify, str) else get_cert_path(True)}


def _system_trust() -> dict[int, Any]:
    """Whom OpenSSL trusts on this system; pycurl's own has other places."""
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
    """Of a bucket, as its server says; also where it refuses everything else."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        answer = wait(client.head_bucket(Bucket=bucket))
    except ClientError as error:
        answer = error.response
    except (BotoCoreError, TimeoutError) as error:
        raise _UnfitError(f"region of the bucket ({error!r})") from error
    return answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")


def _gcs(system: Any, bucket: str, connections: int) -> Objects:
    """As gcsfs and google.auth find it: options, fsspec's configuration, environment, Google's files."""
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
    curl = Curl(connections=connections, login=_Kept(ask), options=_system_trust())
    return Objects(curl, _of_key(root, safe="", end="?alt=media"))


def _http(system: Any, server: str, connections: int) -> Objects:
    """As fsspec asks a web server; redirections are followed, as a hub's to where its files are."""
    import pycurl
    from fsspec.implementations.http import get_client

    if system.client_kwargs or system.get_client is not get_client or set(system.kwargs) - UNUSED - {"headers"}:
        raise _UnfitError("options of aiohttp")
    lines = {k: v for k, v in (system.kwargs.get("headers") or {}).items() if k.lower() != "accept-encoding"}
    login = Login(("Accept-Encoding: identity", *(f"{name}: {value}" for name, value in lines.items())))
    options = {**_system_trust(), pycurl.FOLLOWLOCATION: 1, pycurl.MAXREDIRS: 5}
    curl = Curl(connections=connections, login=lambda: login, options=options, coded=False)

    def url(place: str) -> str | None:
        try:
            return str(system.encode_url(place))
        except ValueError:
            return None

    return Objects(curl, url)
