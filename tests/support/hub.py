"""What stands in for the Hugging Face Hub: a repository's folder by resolve URLs and a tree, and
its S3 gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.support.http import send as send
from tests.support.http import serving as serving

TOKEN = "hf_secret"
_PAGE = 50


def repository(folder: Path) -> Callable[[BaseHTTPRequestHandler], None]:
    """``folder`` as the repository team/policy; its files are at another host, which must not see
    the token."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        port = request.server.server_address[1]
        if url.path.startswith("/files/"):
            assert request.headers["Authorization"] is None
            data = (folder / url.path.removeprefix("/files/")).read_bytes()
            first, _, last = (request.headers["Range"] or "").removeprefix("bytes=").partition("-")
            if not first:
                return send(request, 200, data)
            if int(first) >= len(data):
                return send(request, 416)
            return send(request, 206, data[int(first) : int(last) + 1])
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return send(request, 401)
        for prefix in ("/team/policy/resolve/main/", "/api/models/team/policy/tree/main/"):
            name = url.path.removeprefix(prefix)
            if name == url.path:
                continue
            if prefix.startswith("/team") and (folder / name).is_file():
                return send(request, 302, Location=f"http://localhost:{port}/files/{name}")
            if prefix.startswith("/api") and (folder / name).is_dir():
                files = sorted(each for each in (folder / name).rglob("*") if each.is_file())
                start = int(parse_qs(url.query).get("cursor", ["0"])[0])
                page = [
                    {
                        "type": "file",
                        "path": str(each.relative_to(folder)),
                        "size": each.stat().st_size,
                    }
                    for each in files[start : start + _PAGE]
                ]
                more = {"Link": f'<{url.path}?recursive=true&cursor={start + _PAGE}>; rel="next"'}
                return send(
                    request,
                    200,
                    json.dumps(page).encode(),
                    **(more if files[start + _PAGE :] else {}),
                )
        missing = {} if "/team/policy/" in url.path else {"X_Error_Code": "RepoNotFound"}
        return send(request, 404, **missing)

    return answer


def gateway(s3: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """The S3 server at ``s3`` below the namespace team."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        assert request.path.startswith("/team/")
        behind = HTTPConnection(urlsplit(s3).netloc)
        body = request.rfile.read(int(request.headers["Content-Length"] or 0))
        behind.request(
            request.command, request.path.removeprefix("/team"), body, dict(request.headers)
        )
        got = behind.getresponse()
        kept = {
            k.replace("-", "_"): v
            for k, v in got.getheaders()
            if k.lower() in ("etag", "last-modified", "content-range")
        }
        length = (
            {"Content_Length": got.headers["Content-Length"]} if request.command == "HEAD" else {}
        )
        send(request, got.status, got.read(), **kept, **length)
        behind.close()

    return answer
