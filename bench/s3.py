"""An S3 server for measurements: nginx caches moto's answers, and sends them after a latency that costs no CPU time.

moto's server takes 4 ms of CPU time per request, more than decoding the image. nginx in front of it caches whole
objects, which takes 50 us per request. Listings, HEAD and everything else still go to moto.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

NGINX = """
{modules}
{user}
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  keepalive_timeout 1h;
  keepalive_requests 100000000;
  client_max_body_size 0;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/temp;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  open_file_cache max=100000 inactive=1d;
  open_file_cache_valid 1d;
  proxy_cache_path {folder}/objects levels=1:2 keys_zone=objects:64m inactive=30d use_temp_path=off;
  map $args $listing {{ "" 0; default 1; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      access_by_lua_block {{ ngx.sleep({latency}) }}
      proxy_pass http://127.0.0.1:{upstream};
      proxy_set_header Host $http_host;
      proxy_set_header x-amz-checksum-mode "";  # the checksum of an object is not that of its ranges
      proxy_cache objects;
      proxy_cache_key $request_method$uri;
      proxy_cache_convert_head off;
      proxy_cache_valid 200 30d;
      proxy_ignore_headers Cache-Control Expires Set-Cookie Vary;
      proxy_cache_bypass $listing;
      proxy_no_cache $listing;
    }}
  }}
}}
"""


@dataclass
class Server:
    """A bucket behind an endpoint.

    Args:
        endpoint: URL of the S3 API.
        url: URL of the folder in the bucket.
        how: description of the server.
        pids: the server's processes.
    """

    endpoint: str
    url: str
    how: str
    pids: list[int]

    def seconds(self) -> float:
        """CPU seconds of the server so far."""
        return sum(map(seconds, self.pids))


def seconds(pid: int) -> float:
    """CPU seconds of a process and its living descendants, user and system."""
    total = 0.0
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(seconds, map(int, (task / "children").read_text().split())))
    return total


@contextlib.contextmanager
def serve(root: Path, latency: float) -> Iterator[Server]:
    """The folder in a bucket.

    Raises:
        ImportError: without moto.
    """
    from servers import bucket_of, new_s3, proxied

    with contextlib.ExitStack() as stack:
        mine = set(_children())
        upstream = stack.enter_context(new_s3())
        moto = sorted(set(_children()) - mine)
        url = bucket_of(upstream, root, "bench", root.name)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            port, pid = stack.enter_context(_nginx(folder, upstream, latency))
        except _NoNginx as reason:
            _, endpoint = stack.enter_context(proxied(upstream, latency=latency))
            how = f"moto's server behind a proxy in Python, as there is no fast one: {reason}"
            yield Server(endpoint, url, how, moto)
            return
        how = f"moto's server behind nginx, which caches objects and answers after {1000 * latency:.0f} ms"
        yield Server(f"http://127.0.0.1:{port}", url, how, [*moto, pid])


class _NoNginx(Exception):  # noqa: N818
    pass


@contextlib.contextmanager
def _nginx(folder: Path, upstream: int, latency: float) -> Iterator[tuple[int, int]]:
    """Port and process."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if program is None:
        raise _NoNginx("no nginx (Debian: apt install nginx libnginx-mod-http-lua)")
    built = subprocess.run([program, "-V"], capture_output=True, text=True).stderr
    found = re.search(r"--modules-path=(\S+)", built)
    modules = [Path(found[1] if found else "/usr/lib/nginx/modules") / f"{name}_http_{kind}module.so"
               for name, kind in (("ndk", ""), ("ngx", "lua_"))]  # fmt: skip
    if not all(module.exists() for module in modules):
        raise _NoNginx("nginx has no Lua to wait with (Debian: apt install libnginx-mod-http-lua)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(
        NGINX.format(
            modules="\n".join(f"load_module {module};" for module in modules),
            folder=folder,
            port=port,
            user="user root;" if os.geteuid() == 0 else "",
            upstream=upstream,
            latency=latency,
        )
    )
    process = subprocess.Popen(
        [program, "-p", str(folder), "-c", str(folder / "nginx.conf")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            if process.poll() is not None:
                log = folder / "error.log"
                raise _NoNginx(f"nginx ended: {log.read_text()[-300:].strip() if log.exists() else ''}")
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def _children() -> list[int]:
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
