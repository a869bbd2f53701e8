"""What URLs and storage options say, where keys come from, and what is never told."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from s3_gate import s3_gate
from s3_rig import KEY, SECRET, SeaweedServer

from ckptfmt.backends.obstore_store import obstore_backend
from ckptfmt.backends.s3 import s3_backend
from ckptfmt.backends.s3_credentials import CredentialChain, chain
from ckptfmt.backends.s3_options import parse_options, parse_place
from ckptfmt.backends.s3_signing import Credentials
from ckptfmt.connect import backend_for
from ckptfmt.errors import AccessDenied, InvalidInput, Unavailable

Answers = dict[str, Callable[[BaseHTTPRequestHandler], str | None]]


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


# -- places -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("url", "endpoint", "base", "prefix", "shown"),
    [
        ("s3://buck/a/b/", "https://buck.s3.us-east-1.amazonaws.com", "", "a/b", "s3://buck/a/b"),
        ("s3://buck", "https://buck.s3.us-east-1.amazonaws.com", "", "", "s3://buck"),
        ("s3://b.u.c/x", "https://s3.us-east-1.amazonaws.com", "/b.u.c", "x", "s3://b.u.c/x"),
        ("s3://buck/x?region=eu-west-3", "https://buck.s3.eu-west-3.amazonaws.com", "", "x", "s3://buck/x"),
        ("s3://buck/x?region=cn-north-1", "https://buck.s3.cn-north-1.amazonaws.com.cn", "", "x", "s3://buck/x"),
        ("s3://buck/x?addressing=path", "https://s3.us-east-1.amazonaws.com", "/buck", "x", "s3://buck/x"),
        (
            "s3://buck/x?endpoint=https://minio.lan:9000",
            "https://minio.lan:9000",
            "/buck",
            "x",
            "s3://buck/x?endpoint=https://minio.lan:9000",
        ),
        (
            "s3://buck/x?endpoint_url=http://minio.lan&allow_http=true",
            "http://minio.lan",
            "/buck",
            "x",
            "s3://buck/x?endpoint=http://minio.lan&allow_http=true",
        ),
        (
            "s3://buck/x?endpoint=http://127.0.0.1:9&addressing=virtual",
            "http://buck.127.0.0.1:9",
            "",
            "x",
            "s3://buck/x?endpoint=http://127.0.0.1:9&addressing=virtual",
        ),
    ],
)
def test_a_url_names_a_place(url: str, endpoint: str, base: str, prefix: str, shown: str) -> None:
    place = parse_place(url)
    assert (place.endpoint, place.base, place.prefix, place.url) == (endpoint, base, prefix, shown)
    again = parse_place(place.url, {"region": place.region})
    assert (again.bucket, again.prefix, again.url) == (place.bucket, prefix, shown)


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("s3://buck/x", {"key": "SECRET", "secret": "SECRET", "token": "SECRET"}, {"region": "us-east-1"}),
        ("s3://buck/x", {"aws_region": "eu-9", "anon": True}, {"region": "eu-9", "anon": True}),
        ("s3://buck/x?requester_pays=true", {"addressing": "path"}, {"requester_pays": True, "addressing": "path"}),
        (
            "s3://buck/x",
            {"endpoint_url": "http://minio.lan", "allow_http": True, "addressing": "virtual", "timeout": 5},
            {"timeout": 5.0},
        ),
        ("s3://buck/x", {"credentials": dict, "profile": "lab"}, {"profile": "lab"}),
        ("gs://buck/x", {"token": "SECRET", "timeout": 5}, {"timeout": 5.0}),
        ("az://buck/x", {"account_name": "a", "account_key": "U0VDUkVU"}, {"account_name": "a"}),
        ("/x", {"direct": False}, {"direct": False}),
        ("fsspec+memory://x", {"single_writer": True, "password": "SECRET"}, {"single_writer": True}),
        ("memory://options", None, {}),
    ],
)
def test_a_backend_tells_what_leads_there_again_and_no_secrets(
    url: str, options: dict[str, Any] | None, told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[profile lab]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    backend = backend_for(url, options)
    assert dict(backend.storage_options) == ({"region": "us-east-1"} | told if url.startswith("s3:") else told)
    again = backend_for(backend.url, backend.storage_options)
    assert (again.url, again.storage_options) == (backend.url, backend.storage_options)


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        ("s3://", {}, "bucket"),
        ("s3:///x", {}, "bucket"),
        ("s3://buck/a/../b", {}, "prefix"),
        ("s3://key:SECRET@buck/x", {}, "storage_options"),
        ("s3://buck/x?secret=SECRET", {}, "storage_options"),
        ("s3://buck/x?aws_access_key_id=SECRET", {}, "storage_options"),
        ("s3://buck/x?regoin=x", {}, "unknown regoin; known are: key"),
        ("s3://buck/x", {"nonsense": "SECRET"}, "unknown nonsense; known are: key"),
        ("s3://buck/x", {"key": "a", "aws_access_key_id": "SECRET"}, "says again"),
        ("s3://buck/x?region=a", {"region_name": "b"}, "give it once"),
        ("s3://buck/x", {"key": "SECRET"}, "both key and secret"),
        ("s3://buck/x", {"timeout": "SECRET"}, "timeout"),
        ("s3://buck/x", {"credentials": "SECRET"}, "callable"),
        ("s3://buck/x", {"client_kwargs": "SECRET"}, "client_kwargs"),
        ("s3://buck/x?endpoint=http://minio.lan", {}, "allow_http"),
        ("s3://buck/x?endpoint=minio.lan", {}, "https://"),
        ("s3://buck/x?endpoint=https://minio.lan/path", {}, "nothing behind"),
        ("s3://buck/x", {"endpoint": "https://a:SECRET@minio.lan"}, "no keys"),
        ("gs://buck/x", {"endpoint": "https://a:SECRET@gcs.lan"}, "no keys"),
        ("az://buck/x", {"endpoint": "https://azure.lan/account?sig=SECRET"}, "nothing behind"),
        ("s3://buck/x?region=a.b/c", {}, "region"),
        ("gs://buck/x", {"nonsense": 1}, "unknown nonsense; known are: anon"),
        ("az://buck/x", {"account_name": 5}, "account_name"),
        ("gs://buck/x?endpoint=http://a", {}, "storage_options"),
        ("gs://", {}, "bucket"),
        ("az://buck/x", {"retry_attempts": 0}, "retry_attempts"),
        ("nosuch://buck/x", {}, "scheme 'nosuch'"),
    ],
)
def test_what_cannot_be_right_is_refused(url: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match) as caught:
        backend_for(url, options)
    assert "SECRET" not in str(caught.value)


def test_names_of_other_tools_are_known() -> None:
    """s3fs, boto3, obstore."""
    s3fs = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": "https://a", "region_name": "b"}}
    boto = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "endpoint_url": "https://a", "region_name": "b"}
    obstore = {"access_key_id": "k", "secret_access_key": "s", "endpoint": "https://a", "region": "b"}
    assert parse_options(s3fs) == parse_options(boto) == parse_options(obstore)
    assert parse_options({"anon": "true", "retry_attempts": "3"}).retry_attempts == 3


def test_the_environment_names_place_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://general.lan")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "r-1")
    assert parse_place("s3://buck").endpoint == "https://general.lan"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.lan")
    monkeypatch.setenv("AWS_REGION", "r-2")
    place = parse_place("s3://buck")
    assert (place.endpoint, place.region) == ("https://s3.lan", "r-2")
    assert parse_place("s3://buck?endpoint=https://named.lan").endpoint == "https://named.lan"


def test_nothing_is_loaded_or_sent_for_a_name() -> None:
    code = (
        "import sys, ckptfmt.connect as c; b = c.backend_for('s3://buck/x', {'key': 'a', 'secret': 'b'});"
        "print(b.url, sorted({'obstore', 'botocore', 'boto3', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["s3://buck/x", "[]"], done.stderr


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("az", "azure")])
def test_a_missing_obstore_names_the_extra(scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(InvalidInput, match=rf"pip install 'ckptfmt\[{extra}\]'"):
        backend_for(f"{scheme}://buck/x")


def test_google_and_azure_are_reached_and_retried_by_us_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that refuses everything sees each request as often as we say."""
    seen: list[str] = []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.path)

    with web({"": busy}) as endpoint:
        common = {"endpoint": endpoint, "allow_http": True, "anon": True, "retry_attempts": 2}
        for url, more in (("gs://buck/a b", {}), ("az://cont/a b", {"account_name": "me"})):
            backend = obstore_backend(url, {**common, **more})
            seen.clear()
            with pytest.raises(Unavailable, match=url.partition("/a")[0]):
                backend.read("x/y", limit=10)
            assert len(seen) == 2
            assert unquote(seen[0]).partition("?")[0].endswith("/a b/x/y")


# -- signatures and keys ----------------------------------------------------------------------------------
def test_secrets_are_never_shown() -> None:
    keys = Credentials("key", "SECRET", "TOKEN-SECRET", 5.0)
    assert "SECRET" not in f"{keys!r} {keys}"
    place = s3_backend("s3://buck", {"key": "k", "secret": "SECRET", "token": "SECRET"})
    assert "SECRET" not in f"{place!r} {place._place} {place._place.store!r} {place.url}"


def fetch(**options: Any) -> CredentialChain:
    given = dict.fromkeys(("key", "secret", "token", "provider", "profile"))
    return chain(**{**given, "region": "us-east-1", **options})


def test_no_keys_at_all_is_said() -> None:
    with pytest.raises(AccessDenied, match="AWS_ACCESS_KEY_ID") as caught:
        fetch().current()
    assert caught.value.kind == "no_credentials"


def test_the_environment_comes_before_the_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=d\naws_secret_access_key=ds\n[other]\naws_access_key_id=o\naws_secret_access_key=os\n"
    )
    assert fetch().current() == Credentials("d", "ds")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert fetch().current() == Credentials("o", "os")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "es")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "et")
    assert fetch().current() == Credentials("e", "es", "et")
    assert fetch(profile="default").current() == Credentials("d", "ds")
    assert fetch(key="k", secret="ks").current() == Credentials("k", "ks")


def test_a_profile_names_region_and_endpoint(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[profile lab]\nregion=lab-1\nendpoint_url=https://lab.lan\n")
    place = parse_place("s3://buck", {"profile": "lab"})
    assert (place.region, place.endpoint) == ("lab-1", "https://lab.lan")


def test_a_process_gives_keys_and_its_words_are_not_told(tmp_path: Path) -> None:
    script = tmp_path / "give.py"
    script.write_text(
        "import json, sys\n"
        "if len(sys.argv) > 1: sys.exit('SECRET')\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'p', 'SecretAccessKey': 'ps', 'SessionToken': 'pt',"
        " 'Expiration': '2999-01-01T00:00:00Z'}))\n"
    )
    (tmp_path / "config").write_text(
        f"[profile good]\ncredential_process={sys.executable} {script}\n"
        f"[profile bad]\ncredential_process={sys.executable} {script} SECRET\n"
    )
    found = fetch(profile="good").current()
    assert (found.key, found.secret, found.token) == ("p", "ps", "pt")
    assert found.expires is not None
    assert found.expires > time.time()
    with pytest.raises(AccessDenied, match="bad") as caught:
        fetch(profile="bad").current()
    assert "SECRET" not in str(caught.value)


def test_keys_are_fetched_again_before_they_expire() -> None:
    given = iter(range(10))

    def provide() -> dict[str, Any]:
        number = next(given)
        return {"key": f"k{number}", "secret": "s", "expires_at": time.time() + (60 if number < 2 else 3600)}

    keys = fetch(provider=provide)
    assert [keys.current().key for _ in range(4)] == ["k0", "k1", "k2", "k2"]


def test_a_provider_that_gives_nonsense_is_told() -> None:
    with pytest.raises(AccessDenied, match="mapping"):
        fetch(provider=lambda: "SECRET").current()


class web:
    """A server that answers paths by functions; None = 503."""

    def __init__(self, answers: Answers) -> None:
        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                found = next((answer for path, answer in answers.items() if self.path.startswith(path)), None)
                text = found(self) if found else None
                self.send_response(503 if text is None else 200)
                body = (text or "").encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = _serve

            def log_message(self, *words: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _keys(name: str) -> str:
    return json.dumps({"AccessKeyId": name, "SecretAccessKey": "s", "Token": "t", "Expiration": "2999-01-01T00:00:00Z"})


def test_a_container_gives_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("let me in\n")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    answers: Answers = {"/c": lambda ask: _keys("c") if ask.headers["Authorization"] == "let me in" else None}
    with web(answers) as url:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/c")
        assert fetch().current().key == "c"


def test_a_machine_gives_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_let_in(ask: BaseHTTPRequestHandler) -> bool:
        return ask.headers["X-aws-ec2-metadata-token"] == "token"

    answers: Answers = {
        "/latest/api/token": lambda ask: "token" if ask.command == "PUT" else None,
        "/latest/meta-data/iam/security-credentials/role": lambda ask: _keys("m") if is_let_in(ask) else None,
        "/latest/meta-data/iam/security-credentials/": lambda ask: "role" if is_let_in(ask) else None,
    }
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    with web(answers) as url:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        assert fetch().current().key == "m"


def test_a_web_identity_gives_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jwt").write_text("jwt")

    def assume(ask: BaseHTTPRequestHandler) -> str | None:
        said = ask.rfile.read(int(ask.headers["Content-Length"])).decode()
        if "WebIdentityToken=jwt" not in said or "RoleArn=arn%3Arole" not in said:
            return None
        return (
            '<R xmlns="https://sts"><Credentials><AccessKeyId>w</AccessKeyId><SecretAccessKey>s</SecretAccessKey>'
            "<SessionToken>t</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></R>"
        )

    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "jwt"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:role")
    with web({"/": assume}) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        assert fetch().current().key == "w"
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:other")
        with pytest.raises(AccessDenied, match="arn:other"):
            fetch().current()


# -- TLS --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "9",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "cert"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder / "cert", folder / "key"


def test_a_server_is_trusted_by_its_certificate(seaweed: SeaweedServer, certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with s3_gate(seaweed.port, context) as gate:
        options = {"endpoint": gate.endpoint, "key": KEY, "secret": SECRET, "retry_attempts": 1}
        url = f"s3://{seaweed.new_root()}"
        trusting = s3_backend(url, {**options, "verify": str(certificate[0])})
        data = bytes(range(256)) * 40_000
        writer = trusting.open_writer("big", len(data))
        writer.write_at(0, data)
        writer.finish()
        buffer = bytearray(len(data))
        trusting.read_into("big", 0, memoryview(buffer))
        assert buffer == data
        assert s3_backend(url, {**options, "verify": False}).head("big").nbytes == len(data)
        with pytest.raises(Unavailable, match=r"certificate|CERTIFICATE"):
            s3_backend(url, options).head("big")
        trusting.close()


def test_a_proxy_of_the_environment_is_used_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfmt.backends.http_client import HttpClient

    seen: list[str] = []

    def told(ask: BaseHTTPRequestHandler) -> str:
        seen.append(ask.path)
        return "through the proxy"

    with web({"": told}) as url:
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.delenv("no_proxy", raising=False)
        far = HttpClient("http://far.invalid", timeout=5, connect_timeout=5)
        assert far.exchange("GET", "/x", {"host": "far.invalid"}).body == b"through the proxy"
        assert seen == ["http://far.invalid/x"]
        near = HttpClient(url, timeout=5, connect_timeout=5)
        near.exchange("GET", "/y", {"host": "near"})
        assert seen[1:] == ["/y"]
        far.close()
        near.close()


def test_a_reader_of_public_buckets_signs_nothing(seaweed: SeaweedServer) -> None:
    with s3_gate(seaweed.port) as gate:
        backend = s3_backend("s3://buck/x", {"endpoint": gate.endpoint, "anon": True})
        with pytest.raises(AccessDenied):
            backend.head("x")
        assert "authorization" not in gate.seen[0].headers
        backend.close()
