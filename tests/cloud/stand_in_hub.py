"""A Hub on loopback: enough of its API for the real client to create, push and read back.

It checks what the client sends, not the Hub's own rules. Files are kept in memory.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_" + "loopbackTOKEN0123456789"
LIMITED = "hf_" + "readonlyTOKEN0123456789"


class Hub(ThreadingHTTPServer):
    """Serves on a port of the system's choice; use as a context manager."""

    daemon_threads = True

    def __init__(self, mode="regular"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode = mode  # what it asks the client to do with files: regular or lfs
        self.break_after = None  # refuse uploads of large files once so many have come
        self.repos, self.private = {}, set()  # files by repository, and those that are private
        self.blobs, self.uploads = {}, []  # the large files that were sent, and their names in order
        self.asked = []  # method and path of every request
        self.one_at_a_time = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, value=None, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def refused(self):
        """Whether the token is unknown, or may only read."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (TOKEN, LIMITED):
            self.answer(401, {"error": "Invalid credentials"})
        elif token == LIMITED and self.command != "GET":
            self.answer(403, {"error": "Forbidden: you need write rights"})
        else:
            return False
        return True

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append((self.command, path))
        for repo, files in hub.repos.items():
            if path.startswith(f"/{repo}/resolve/"):
                name = path.split("/", 5)[5]
                if name in files:
                    digest = hashlib.sha256(files[name]).hexdigest()
                    return self.answer(200, files[name], ETag=f'"{digest}"', X_Repo_Commit="c" * 40)
                return self.answer(404, {"error": "not found"}, X_Error_Code="EntryNotFound")
            if path.startswith(f"/api/models/{repo}"):
                there = [{"rfilename": name} for name in files]
                about = {"id": repo, "sha": "c" * 40, "private": repo in hub.private, "tags": [], "siblings": there}
                return self.answer(200, about)
        return self.answer(200 if path == "/" else 404, {})

    do_HEAD = do_GET

    def do_PUT(self):
        hub = self.server
        hub.asked.append(("PUT", self.path))
        content = self.body()
        with hub.one_at_a_time:  # the client sends several files side by side
            if hub.break_after is not None and len(hub.uploads) >= hub.break_after:
                return self.answer(507, {"error": "Insufficient storage"})  # one that the client does not try again
            digest = self.path.rsplit("/", 1)[1]
            assert hashlib.sha256(content).hexdigest() == digest
            hub.blobs[digest] = content
            hub.uploads.append(digest)
        self.answer(200, {})

    def do_POST(self):
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append(("POST", path))
        body = self.body()
        if self.refused():
            return None
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'learner'}/{asked['name']}"
            known = repo in hub.repos
            hub.repos.setdefault(repo, {})
            if (asked.get("private") or asked.get("visibility") == "private") and not known:
                hub.private.add(repo)
            answer = {"url": f"{hub.url}/{repo}", "name": repo, "id": repo}
            return self.answer(409 if known else 200, answer)
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = []
            for name in (file["path"] for file in json.loads(body)["files"]):
                mode = hub.mode if name.endswith(".safetensors") else "regular"
                files.append({"path": name, "shouldIgnore": False, "oid": None, "uploadMode": mode})
            return self.answer(200, {"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(body)["objects"]]
            for wanted in objects:
                if wanted["oid"] not in hub.blobs:
                    wanted["actions"] = {"upload": {"href": f"{hub.url}/upload/{wanted['oid']}"}}
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            repo = path.split("/commit/")[0].removeprefix("/api/models/")
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.repos[repo][value["path"]] = hub.blobs[value["oid"]]
            commit = {"commitOid": "c" * 40, "commitUrl": f"{hub.url}/{repo}/commit/{'c' * 40}"}
            return self.answer(200, {"success": True, "hookOutput": ""} | commit)
        return self.answer(404, {"error": f"no {path}"})
