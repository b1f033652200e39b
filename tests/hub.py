"""A server on loopback that answers as the Hugging Face Hub does about one dataset, `org/name`."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
from huggingface_hub import close_session, constants

API = re.compile(r"/api/datasets/org/name(?:/(?P<what>[\w-]+)/(?P<revision>\w+)/?(?P<path>.*))?")
CONTENT = re.compile(r"/datasets/org/name/resolve/\w+/(?P<path>.+)")


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: Mapping[str, bytes]

    def log_message(self, *parts: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if content := CONTENT.fullmatch(path):
            return self._content(self.files.get(content["path"]))
        if (asked := API.fullmatch(path)) is None or asked["revision"] not in (None, "main", "v2"):
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if asked["what"] == "tree":
            return self._json(self._tree(asked["path"]))
        return self._json({"id": "org/name", "sha": "0" * 40, "siblings": []})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        wanted = parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
        self._json([entry for entry in self._tree("") if entry["path"] in wanted])

    def _tree(self, folder: str) -> list[dict]:
        paths = [PurePosixPath(name) for name in self.files]
        entries = [
            {"type": "file", "oid": "0" * 40, "size": len(content), "path": name}
            for name, content in self.files.items()
        ]
        folders = {str(parent) for path in paths for parent in path.parents} - {"."}
        entries += [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": name} for name in folders
        ]
        return [entry for entry in entries if not folder or entry["path"].startswith(f"{folder}/")]

    def _content(self, content: bytes | None) -> None:
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None:
            return self._send(200, content)
        begin, end = int(part[1]), min(int(part[2]), len(content) - 1)
        header = {"Content-Range": f"bytes {begin}-{end}/{len(content)}"}
        return self._send(206, content[begin : end + 1], header)

    def _json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[None]:
    """Answer clients of this process, inside the block, with `files` by their paths in `org/name`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"files": files}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # As `HF_ENDPOINT` sets them where the package is imported.
    names = ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE")
    before = {name: getattr(constants, name) for name in names}
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in before.items():
        setattr(constants, name, value.replace(before["ENDPOINT"], address))
    fsspec.get_filesystem_class("hf").clear_instance_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(constants, name, value)
        fsspec.get_filesystem_class("hf").clear_instance_cache()
        close_session()
        server.shutdown()
        server.server_close()
