"""Object stores (S3, Google Cloud Storage, Azure) through obstore. botocore finds the endpoint and the login of S3."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from gpuaug.errors import ConfigError, ReadError, SourceError
from gpuaug.source.paths import redact
from gpuaug.source.remote.ranges import Range, StatusError, check_size, clean, status_error, too_long, version_of

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "abfs", "abfss": "abfss"}
# obstore's names for options of fsspec
NAMES = {"g": {"anon": "skip_signature", "endpoint_url": "base_url"}}
NAMES["a"] = {"anon": "skip_signature", "endpoint_url": "endpoint"}
NAMES["s"] = {**NAMES["a"], "key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}
NAMES["s"] |= {"region_name": "region", "requester_pays": "request_payer"}
# by kind of store: its host; names of its variables; hosts from which obstore gets credentials (for S3, botocore does)
ENDPOINTS = {"g": "https://storage.googleapis.com", "a": "https://{}.blob.core.windows.net"}
VARIABLES = {"g": r"google_", "a": r"azure_(?:storage_)?|(?=identity_endpoint$)", "s": r"$"}
LOGINS = {"g": {"accounts.google.com", "metadata.google.internal", "169.254.169.254"}, "s": set[str]()}
LOGINS["a"] = {"login.microsoftonline.com", "login.microsoftonline.us", "login.microsoftonline.de"}
LOGINS["a"] |= {"login.chinacloudapi.cn", "169.254.169.254"}
METADATA = ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
NOWHERE = "127.0.0.1:0"  # nothing can listen there

_AMAZON = re.compile(r"https://s3[.-](?:[a-z0-9-]+\.)?amazonaws\.com(?:\.cn)?")
_REQUEST = re.compile(r"Error performing [A-Z]+ \S+ in \S+ - |^Generic \w+ error: (?!.*Error performing)")
_STATUS = re.compile(r"status code: (\d+)")
_WORDS = re.compile(r"<(?:Code|Message)>([^<]*)<")
_CAUSE = re.compile(r'(?:message|error): "?([^"\n]+?)"?,?\n')
_lock = threading.Lock()
_forked = False  # whether this process was forked with obstore loaded


def _after_fork() -> None:
    global _lock, _forked
    _lock, _forked = threading.Lock(), "obstore._obstore" in sys.modules


os.register_at_fork(after_in_child=_after_fork)


def _load() -> Any:
    """Import ``obstore.store``.

    obstore's threads do not exist in a forked process, and it cannot start them again: every request would wait for
    ever. So a forked process loads a copy of the library, which takes 20 ms.
    """
    global _forked
    with _lock:
        if _forked:
            name, create = "obstore._obstore", getattr(os, "memfd_create", None)
            library = sys.modules[name].__file__ or ""
            if create is None:
                raise SourceError("a forked process cannot read object stores here. Set `start_method=spawn`.")
            for module in [x for x in sys.modules if x.partition(".")[0] == "obstore"]:
                del sys.modules[module]
            with open(library, "rb") as file, open(create("obstore"), "wb") as copy:  # a folder may forbid execution
                shutil.copyfileobj(file, copy)
                copy.flush()
                # with the process's number, because the same path would be the library that is already loaded
                loader = ExtensionFileLoader(name, f"{os.path.realpath('/proc/self')}/fd/{copy.fileno()}")
                sys.modules[name] = loaded = module_from_spec(spec_from_loader(name, loader))  # type: ignore[arg-type]
                loaded.__file__ = library  # for a fork of this process
                loader.exec_module(loaded)
            _forked = False
        import obstore.store

        return obstore.store


class Bucket:
    """Reads and lists the objects of a bucket.

    Args:
        url: the URL of the bucket, without a path.
        remote: the :class:`gpuaug.Remote`.
    """

    def __init__(self, url: str, remote: Any) -> None:
        self.url, self.remote = url, remote
        scheme, bucket = url.split("://", 1)
        names = NAMES[SCHEMES[scheme][0]]
        options = {names.get(key, key): value for key, value in (remote.options or {}).items()}
        self._client = {"user_agent": "gpuaug", **options.pop("client_options", {})}
        self._login = options.pop("credential_provider", None)
        profile, verify = options.pop("profile", None), options.pop("verify", None)
        self._options = options
        self._place = f"{SCHEMES[scheme]}://{bucket}"
        self._store = lru_cache(None)(self._open)
        self._from_url = _load().from_url
        self._error = sys.modules["obstore.exceptions"].BaseError
        try:
            config = self._open(remote.timeout, 0).config
        except self._error as error:
            raise ValueError(str(error)) from error
        if SCHEMES[scheme] == "s3":
            self._find_s3(bucket, profile, verify)
            config = self._options
        if not remote.redirects:
            self._refuse_redirects(SCHEMES[scheme][0], config)

    def _open(self, seconds: float, retries: int) -> Any:
        insecure = any(str(self._options.get(key)).startswith("http://") for key in ("endpoint", "base_url"))
        client = {"allow_http": insecure, **self._client, "timeout": timedelta(seconds=seconds)}
        return self._from_url(
            self._place, config=self._options, client_options=client, retry_config={"max_retries": retries},
            credential_provider=self._login,
        )  # fmt: skip

    def _find_s3(self, bucket: str, profile: str | None, verify: bool | str | None) -> None:
        """Find endpoint, region, certificates and credentials as the AWS command line does."""
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import Session

        options, seconds = self._options, self.remote.timeout
        config = Config(signature_version=UNSIGNED, connect_timeout=seconds, read_timeout=seconds)
        try:
            session = Session(profile=profile)
            verify = session.get_config_variable("ca_bundle") if verify is None else verify
            more = {"endpoint_url": options.get("endpoint"), "config": config, "verify": verify}
            region = options.get("region") or os.environ.get("AWS_REGION")
            client = session.create_client("s3", region_name=region, **more)
            if _AMAZON.fullmatch(client.meta.endpoint_url) and "region" not in options:
                try:
                    answer = client.head_bucket(Bucket=bucket)
                except ClientError as error:
                    answer = error.response  # the server sends the region even if it denies access
                region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", region)
                client = session.create_client("s3", region_name=region, **more)
            if not options.get("skip_signature") and "access_key_id" not in options and self._login is None:
                from obstore.auth.boto3 import Boto3CredentialProvider

                try:  # obstore calls it at most every 100 ms
                    self._login = Boto3CredentialProvider(session, ttl=timedelta(minutes=1))
                except ValueError as error:
                    text = "For a public bucket, set `source.remote.options.anon=true`."
                    raise SourceError(f"no AWS credentials were found. {text}") from error
        except BotoCoreError as error:
            raise SourceError(f"{redact(self.url)!r} cannot be opened: {clean(str(error))}.") from error
        options["endpoint"], options["region"] = client.meta.endpoint_url, client.meta.region_name or "us-east-1"
        if verify is False:
            self._client["allow_invalid_certificates"] = True
        elif isinstance(verify, str):
            with open(verify, "rb") as file:
                self._client["root_certificate"] = file.read()

    def _refuse_redirects(self, kind: str, config: Mapping[str, Any]) -> None:
        """Send requests to other hosts to a dead proxy, because obstore itself follows all redirects.

        Hosts below the store's own are not sent there: obstore takes an exception from the proxy for all names below.
        ``config``: options of the store, which obstore completes from the environment.
        """
        names = re.compile(VARIABLES[kind])
        named: dict[str, Any] = {names.sub("", x.lower()): os.environ[x] for x in os.environ if names.match(x.lower())}
        named.update(config)
        endpoint = named.get("endpoint") or named.get("base_url") or ENDPOINTS[kind].format(named.get("account_name"))
        if named.get("use_emulator", "false") != "false":
            endpoint = os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1")
        url = urlsplit(endpoint)
        hosts = {url.hostname or ""}
        proxies = [x for x in os.environ if x.lower() in (f"{url.scheme}_proxy", "all_proxy") and os.environ[x]]
        proxies = [] if proxy_bypass(url.hostname or "") else proxies
        if "proxy_url" in self._client:
            proxies = ["`source.remote.options.client_options.proxy_url`"]
        if proxies:
            raise ConfigError(
                "`source.remote.redirects=false` needs a direct connection to an object store, because redirects "
                f"behind a proxy cannot be refused. Found: {proxies[0]}. Set `source.remote.redirects=true`, or name "
                f"{url.hostname} in NO_PROXY."
            )
        if str(named.get("skip_signature")).lower() != "true":
            more = [x for x in map(str, named.values()) if "://" in x]
            more += [f"http://{os.environ[x]}" for x in METADATA if x in os.environ]
            hosts |= LOGINS[kind] | {urlsplit(x).hostname or "" for x in more}
        self._client |= {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(filter(None, hosts))}

    def read(self, part: Range) -> bytes:
        with self._errors(part):
            store, key = self._store(part.seconds(self.remote.timeout), 0), self._key(part)
            if part.size is not None:
                return check_size(store.get_range(key, start=part.begin, length=part.size).to_bytes(), part)
            answer = store.get(key)
            if answer.range[1] > part.limit:
                raise too_long(part)
            return bytes(answer.bytes())

    def info(self, part: Range) -> tuple[int, str]:
        """Size and version of an object."""
        with self._errors(part):
            return _size_and_version(self._store(self.remote.timeout, 0).head(self._key(part)))

    def find(self, part: Range) -> list[tuple[str, bool, int, str]]:
        """All objects below a URL: name, False (not a folder), size in bytes, version."""
        key = self._key(part)
        start = len(key) + 1 if key else 0
        with self._errors(part, tries=self.remote.tries):  # a new try would begin with the first page
            chunks = self._store(self.remote.timeout, self.remote.tries - 1).list(key or None, chunk_size=1000)
            return [(x["path"][start:], False, *_size_and_version(x)) for chunk in chunks for x in chunk]

    def _key(self, part: Range) -> str:
        return part.path[len(self.url) + 1 :]

    @contextmanager
    def _errors(self, part: Range, *, tries: int = 0) -> Iterator[None]:
        """Turn errors of obstore into errors of gpuaug. ``tries``: number of tries; 0: the caller tries again."""
        try:
            yield
        except (ValueError, OSError, self._error) as error:
            if isinstance(error, OSError) and error.errno is not None:  # from `check_size`
                raise
            reason = _reason(error, part)
            if tries and isinstance(reason, StatusError | TimeoutError):
                reason = ReadError(f"tried {tries} times: {reason}")
            raise reason from None


def _reason(error: Exception, part: Range) -> Exception:
    """The error of gpuaug for an error of obstore. Its text has the reason, and then all causes in Rust's notation."""
    text, _, causes = str(error).partition("\n\nDebug source")
    text = _REQUEST.split(text, maxsplit=1)[-1]
    url = redact(part.path)
    if "credential provider" in str(error) or "token request" in str(error):
        return ReadError(f"{url!r} cannot be read: no credentials: {clean(text)}")
    if status := _STATUS.search(text):
        return status_error(int(status[1]), part, ": ".join(_WORDS.findall(text)))
    if "non-partial" in text:
        return ReadError(f"the server of {url!r} supports no range requests. Use a server that does.")
    if f"{NOWHERE}," in causes:
        text = f"the server of {url!r} redirects to another host"
        return ReadError(f"{text}. If you trust it, set `source.remote.redirects=true`.")
    if "kind: Timeout" in causes:
        return TimeoutError("no answer in time")
    if isinstance(error, ValueError) or "parsing Path" in text or "empty path segment" in text:
        return ReadError(f"obstore reads no key with an empty part, a control character, . or ..: {clean(text)}")
    return StatusError(clean(": ".join([text, *_CAUSE.findall(causes)[-1:]])))


def _size_and_version(info: Mapping[str, Any]) -> tuple[int, str]:
    return info["size"], version_of(info["size"], [info["e_tag"], info["last_modified"]])
