"""Opens buckets (S3, Google Cloud Storage) and web servers for libcurl (:mod:`gpuaug.source.remote.curl`).

The endpoint and the credentials come from the fsspec file system.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from gpuaug.source.paths import redact
from gpuaug.source.remote.filesystem import UNUSED

log = logging.getLogger("gpuaug")

TIMEOUT_S = 60.0  # longest wait for credentials, or for the region of a bucket
# options that libcurl supports, or that do not matter for libcurl
S3 = UNUSED | {"anon", "endpoint_url", "key", "secret", "token", "username", "password", "use_ssl", "requester_pays"}
S3 |= {"session", "profile", "region_name", "verify", "aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
S3 |= {"max_pool_connections", "retries", "addressing_style"}
NESTED = {"client_kwargs", "config_kwargs", "s3"}  # options that hold options
GCS = UNUSED | {"project", "access", "token", "endpoint_url", "consistency", "timeout"}
LIBCURL = 0x080400  # 8.4, the first version that limits the size of answers without Content-Length
SPECIAL = re.compile(r"--[a-z]+-s3$|-s3alias$")  # directory buckets and access points
AMAZON = re.compile(r"https?://s3(?:\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?/?")


class Access(NamedTuple):
    """How libcurl reads the objects of one bucket or web server."""

    url: Callable[[str], str | None]  # converts a user's URL to the URL to request; None: only fsspec can read the key
    options: Mapping[str, Any] = {}  # values of libcurl's options by name
    login: Callable[[], Mapping[str, Any]] = dict  # returns the credentials, as options; called before every read
    encoded: bool = True  # accept answers with ``Content-Encoding``. Object stores may store this header with a file


def open_access(system: Any, bucket: str) -> Access | None:
    """Access to a bucket with the settings of fsspec's ``system``; None if libcurl cannot read the bucket.

    ``bucket``: URL of the bucket or server, without a path.
    """
    scheme, name = bucket.split("://", 1)
    make = {"s3": _s3, "s3a": _s3, "gs": _gcs, "gcs": _gcs, "http": _http, "https": _http}.get(scheme)
    if make is None:
        return None
    try:
        import pycurl

        if pycurl.version_info()[2] < LIBCURL or not hasattr(pycurl, "AWS_SIGV4"):
            raise _UnfitError("libcurl is older than 8.4")
        return make(system, name)
    except ImportError as error:
        reason = f"{error}. For faster reads, `pip install pycurl`"
    except _UnfitError as error:
        reason = str(error)
    log.info("source: %s is read by %s, not libcurl: %s", redact(bucket), type(system).__name__, reason)
    return None


class _UnfitError(Exception):
    """Libcurl cannot read this bucket."""


def _check(options: Mapping[str, Any], known: set[str]) -> None:
    for name, value in options.items():
        if name in NESTED:
            _check(value or {}, known)
        elif name not in known and value not in (None, False, {}):
            raise _UnfitError(f"unsupported option {name}")


def _of_key(root: str, *, safe: str, end: str = "") -> Callable[[str], str | None]:
    """The function for `Access.url`. HTTP clients would change keys such as ``a/../b``, so these keys give None."""

    def url(user_url: str) -> str | None:
        key = user_url.split("://", 1)[1].partition("/")[2]
        if not key or not {"", ".", ".."}.isdisjoint(key.split("/")):
            return None
        try:
            return root + quote(key, safe=safe) + end
        except UnicodeEncodeError:
            return None

    return url


def _s3(system: Any, bucket: str) -> Access:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket) or SPECIAL.search(bucket):
        raise _UnfitError("unsupported access point or directory bucket")
    _check(system.storage_options, S3)

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
    url, options = _of_key(f"{root}/", safe="/~"), _botocore_trust(system)
    lines = ["x-amz-request-payer: requester"] if system.requester_pays else []
    if system.anon:
        return Access(url, {**options, "HTTPHEADER": lines})
    credentials = client._request_signer._credentials
    if credentials is None:
        raise _UnfitError("no credentials")  # s3fs then raises an error that lists where credentials can be

    def login() -> dict[str, Any]:
        frozen = wait(credentials.get_frozen_credentials())  # asks for new credentials only if these expire soon
        token = [f"x-amz-security-token: {frozen.token}"] if frozen.token else []
        return {"HTTPHEADER": [*lines, *token], "USERNAME": frozen.access_key, "PASSWORD": frozen.secret_key}

    return Access(url, {**options, "AWS_SIGV4": f"aws:amz:{region}:s3"}, login)


def _botocore_trust(system: Any) -> dict[str, Any]:
    """Options for libcurl to trust the same certificates as botocore."""
    from botocore.httpsession import get_cert_path

    verify = system.client_kwargs.get("verify")
    if verify is None:
        verify = system.session.get_config_variable("ca_bundle")
    if verify is False:
        return {"SSL_VERIFYPEER": 0, "SSL_VERIFYHOST": 0}
    return {"CAINFO": verify if isinstance(verify, str) else get_cert_path(True)}


def _system_trust() -> dict[str, Any]:
    """Options to trust this system's certificates. The OpenSSL inside pycurl looks for them in other folders."""
    known = ssl.get_default_verify_paths()
    if known.cafile is not None:
        return {"CAINFO": known.cafile}
    if known.capath is not None and os.listdir(known.capath):
        return {"CAPATH": known.capath}
    try:
        import certifi
    except ImportError:
        return {}
    return {"CAINFO": certifi.where()}


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


def _gcs(system: Any, bucket: str) -> Access:
    _check(system.storage_options, GCS)

    def login() -> dict[str, Any]:
        lines: dict[str, str] = {}
        system.credentials.apply(lines)  # asks for new credentials only if these expire soon
        return {"HTTPHEADER": [f"{name}: {value}" for name, value in lines.items()]}

    root = f"{system._location.rstrip('/')}/download/storage/v1/b/{quote(bucket, safe='')}/o/"
    return Access(_of_key(root, safe="", end="?alt=media"), _system_trust(), login)


def _http(system: Any, server: str) -> Access:
    from fsspec.implementations.http import get_client

    if system.client_kwargs or system.get_client is not get_client or set(system.kwargs) - UNUSED - {"headers"}:
        raise _UnfitError("unsupported options of aiohttp")
    lines = {k: v for k, v in (system.kwargs.get("headers") or {}).items() if k.lower() != "accept-encoding"}
    headers = ["Accept-Encoding: identity", *(f"{name}: {value}" for name, value in lines.items())]
    options = {**_system_trust(), "FOLLOWLOCATION": 1, "MAXREDIRS": 5, "HTTPHEADER": headers}

    def url(user_url: str) -> str | None:
        try:
            return str(system.encode_url(user_url))
        except ValueError:
            return None

    return Access(url, options, encoded=False)
