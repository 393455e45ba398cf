"""Server of one bucket with the part of Google Cloud Storage's JSON API that TensorStore and gcsfs
call: objects in memory, generations, and requests that hold for one generation only.

    python tests/support/bucket_server.py PORT

Its bucket is "bucket". With 0 for PORT the system chooses one, which is the first line it prints.
"""

import base64
import itertools
import json
import re
import sys
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c

BUCKET = "bucket"
API = r"(?:/upload|/download)?/storage/v1/b/(?P<bucket>[^/?]+)"


class Bucket:
    """Objects by their names, each with its content and its generation."""

    def __init__(self):
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, int, str]] = {}
        self.uploads: dict[str, tuple[str, dict, bytearray]] = {}
        self.generations = itertools.count(1)

    def put(self, name, content):
        updated = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self.objects[name] = (bytes(content), next(self.generations), updated)
        return self.resource(name)

    def resource(self, name):
        content, generation, updated = self.objects[name]
        checksum = google_crc32c.Checksum(content).digest()
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": BUCKET,
            "generation": str(generation),
            "size": str(len(content)),
            "updated": updated,
            "crc32c": base64.b64encode(checksum).decode(),
        }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and content in one packet
    bucket: Bucket

    def do_GET(self):
        name = self._object()
        if name is None:
            self._bucket_or_list()
            return
        with self.bucket.lock:
            if not self._holds(name) or name not in self.bucket.objects:
                return
            resource, content = self.bucket.resource(name), self.bucket.objects[name][0]
        if self.query.get("alt") != "media":
            self._json(resource)
            return
        status, requested = 200, re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {"x-goog-generation": resource["generation"]}
        if requested:
            begin, end = int(requested[1]), int(requested[2] or len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {begin}-{min(end, len(content)) - 1}/{len(content)}"
            status, content = 206, content[begin:end]
        self._send(status, content, headers)

    def do_POST(self):
        body = self._body()
        self._object()
        if "upload_id" in self.query:
            self._continue_upload(body)
            return
        copied = re.search(r"/o/([^/?]+)/(?:rewriteTo|copyTo)/b/[^/]+/o/([^/?]+)", self.path)
        if copied:
            source, target = (unquote(name) for name in copied.groups())
            with self.bucket.lock:
                if source not in self.bucket.objects:
                    self._error(404, "No such object")
                    return
                resource = self.bucket.put(target, self.bucket.objects[source][0])
            self._json({"done": True, "resource": resource})
            return
        kind, name = self.query.get("uploadType"), self.query.get("name")
        if not self._has_bucket():
            return
        if kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1]
            _, description, data, _ = body.split(b"--" + boundary.encode())
            name = json.loads(_part(description))["name"]
            body = _part(data)
        if kind == "resumable":
            number = str(next(self.bucket.generations))
            name = name or json.loads(body)["name"]
            self.bucket.uploads[number] = (name, dict(self.query), bytearray())
            place = f"http://{self.headers['Host']}{self.path}&upload_id={number}"
            self._send(200, b"{}", {"Location": place})
            return
        self._put(name, body)

    def do_PUT(self):
        body = self._body()
        self._object()
        self._continue_upload(body)

    def _continue_upload(self, body):
        name, query, content = self.bucket.uploads[self.query["upload_id"]]
        content += body
        span = re.match(r"bytes (?:\d+-\d+|\*)/(\d+|\*)", self.headers.get("Content-Range", ""))
        if span and span[1] == "*":
            self._send(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})
            return
        self.query = query
        self._put(name, content)

    def do_DELETE(self):
        name = self._object()
        with self.bucket.lock:
            if not self._holds(name) or name not in self.bucket.objects:
                return
            del self.bucket.objects[name]
        self._send(204, b"")

    def _object(self):
        """Name of the object of the request, whose query it reads."""
        parts = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        matched = re.fullmatch(API + r"(?:/o(?:/(?P<name>.+))?)?", parts.path)
        self.found_bucket = unquote(matched["bucket"]) if matched else None
        return unquote(matched["name"]) if matched and matched["name"] else None

    def _has_bucket(self):
        if self.found_bucket != BUCKET:
            self._error(404, f"The specified bucket does not exist: {self.found_bucket}")
        return self.found_bucket == BUCKET

    def _put(self, name, content):
        with self.bucket.lock:
            resource = self.bucket.put(name, content) if self._holds(name, writes=True) else None
        if resource:
            self._json(resource)

    def _holds(self, name, writes=False):
        """Answers a request whose object is not there, or has another generation than it is for."""
        if not self._has_bucket():
            return False
        generation = self.bucket.objects[name][1] if name in self.bucket.objects else 0
        if self.query.get("ifGenerationMatch", str(generation)) != str(generation):
            self._error(412, "At least one of the pre-conditions you specified did not hold.")
            return False
        if self.query.get("ifGenerationNotMatch") == str(generation):
            self._send(304, b"")
            return False
        if not generation and not writes:
            self._error(404, f"No such object: {BUCKET}/{name}")
        return bool(generation) or writes

    def _bucket_or_list(self):
        if not self._has_bucket():
            return
        if not urlsplit(self.path).path.endswith("/o"):
            self._json({"kind": "storage#bucket", "name": BUCKET})
            return
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        first, last = self.query.get("startOffset", ""), self.query.get("endOffset")
        items, prefixes = [], set()
        with self.bucket.lock:
            for name in sorted(self.bucket.objects):
                if not name.startswith(prefix) or name < first or (last and name >= last):
                    continue
                inner = name.removeprefix(prefix)
                if delimiter and delimiter in inner:
                    prefixes.add(prefix + inner.partition(delimiter)[0] + delimiter)
                else:
                    items.append(self.bucket.resource(name))
        self._json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _error(self, status, message):
        self._json({"error": {"code": status, "message": message}}, status)

    def _json(self, value, status=200):
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status, content, headers=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if status != 304:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if content and status not in (204, 304):
            self.wfile.write(content)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Server of clients that close connections when they have what they need."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _part(text):
    """Content of one part of a multipart body."""
    _, content = re.split(rb"\r?\n\r?\n", text, maxsplit=1)
    return re.sub(rb"\r?\n\Z", b"", content)


def main(port):
    """Serves until the process ends."""
    Handler.bucket = Bucket()
    server = Server(("localhost", port), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
