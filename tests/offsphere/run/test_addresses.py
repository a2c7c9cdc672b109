"""Data behind addresses: secrets stay out of everything shown, and no silence is waited out."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from offsphere.run import addresses
from offsphere.run.addresses import (
    check_address,
    fetch,
    fetch_beside,
    keep_secret,
    patience,
    public,
    real,
)
from offsphere.run.config import command, from_dict, settings_hash, to_yaml
from offsphere.run.record import provenance


@dataclass(frozen=True)
class Config:
    data: str = "emoji"
    seed: int = 0


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_real", {})


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files below /open for everybody, below /private with a password; /silent says nothing."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))  # pyright: ignore
        if self.path.startswith("/silent"):
            time.sleep(2)
        elif self.path.startswith("/private") and self.headers.get("Authorization") is None:
            self.send_error(401)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[http.server.ThreadingHTTPServer]:
    for folder in ("open", "private"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.tar").write_bytes(b"abc")
        (tmp_path / folder / "manifest.json").write_bytes(b"{}")

    def handler(*args: object) -> Handler:
        return Handler(*args, directory=str(tmp_path))  # pyright: ignore[reportArgumentType]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked = []  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("emoji", "emoji"),
        ("csv:a?b#c@d.csv", "csv:a?b#c@d.csv"),
        ("wds:/data/{000..004}.tar", "wds:/data/{000..004}.tar"),
        ("wds:https://h/x-{0..3}.tar", "wds:https://h/x-{0..3}.tar"),
        ("wds:http://user:TOKEN@h:80/x.tar", "wds:http://h:80/x.tar"),
        ("wds:http://TO@KEN@h/x.tar", "wds:http://h/x.tar"),
        ("https://h/x-{0..3}.tar?X-Amz-Signature=TOKEN&a={0..3}", "https://h/x-{0..3}.tar"),
        ("s3://KEY:TOKEN@bucket/x.tar#TOKEN", "s3://bucket/x.tar"),
        ("{http://u:TOKEN@h/a.tar,http://u:TOKEN@h/b.tar}", "{http://h/a.tar,http://h/b.tar}"),
        (
            "pipe:curl -H 'Authorization: Bearer TOKEN' https://h/x.tar?k=TOKEN | cat",
            "pipe:curl -H 'Authorization: ' https://h/x.tar | cat",
        ),
        ("pipe:curl 'https://h/x.tar'?k=TOKEN | cat", "pipe:curl 'https://h/x.tar' | cat"),
        (
            "no answer from http://u:TOKEN@h/x.tar: error 5",
            "no answer from http://h/x.tar: error 5",
        ),
    ],
)
def test_secrets_are_left_out(text: str, shown: str) -> None:
    assert public(text) == shown
    assert public(shown) == shown
    assert keep_secret(text) == shown
    assert real(shown) == text


def test_settings_commands_and_provenance_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "wds:http://user:TOKEN@h/x.tar?sig=TOKEN"
    for config in (Config(whole), from_dict(Config, {"data": whole})):
        assert to_yaml(config) == "data: wds:http://h/x.tar\nseed: 0\n"
        assert command("s.py", config) == "python s.py --data=wds:http://h/x.tar"
        assert settings_hash(config) == settings_hash(Config("wds:http://h/x.tar"))
    assert from_dict(Config, {"data": whole}).data == "wds:http://h/x.tar"
    assert real("http://h/x.tar") == "http://user:TOKEN@h/x.tar?sig=TOKEN"
    monkeypatch.setattr("sys.argv", ["s.py", f"--data={whole}", "--seed=1"])
    assert provenance(None)["command"] == "s.py --data=wds:http://h/x.tar --seed=1"


def test_hashes_without_secrets_are_what_they_were() -> None:
    """Committed rows are found by these."""
    assert settings_hash(Config("wds:https://h/x-{0..3}.tar")) == "50a4713c"
    assert settings_hash(Config("wds:../a?b/{000..004}.tar", seed=3)) == "2613c907"


def test_the_whole_address_is_fetched(server: http.server.ThreadingHTTPServer) -> None:
    place = f"127.0.0.1:{server.server_address[1]}"
    assert fetch(f"http://{place}/open/a.tar").read() == b"abc"
    shown = keep_secret(f"wds:http://user:TOKEN@{place}/private/a.tar?sig=HUSH")
    assert shown == f"wds:http://{place}/private/a.tar"
    with fetch(f"http://{place}/private/a.tar") as file:
        assert file.read() == b"abc"
    assert fetch_beside(f"http://{place}/private/a.tar", "manifest.json") == b"{}"
    assert server.asked[1:] == [  # pyright: ignore[reportAttributeAccessIssue]
        ("/private/a.tar?sig=HUSH", "Basic dXNlcjpUT0tFTg=="),
        ("/private/manifest.json?sig=HUSH", "Basic dXNlcjpUT0tFTg=="),
    ]
    assert fetch_beside(f"http://{place}/open/a.tar", "none.json") is None


def test_what_a_server_refuses_is_said_in_a_line(server: http.server.ThreadingHTTPServer) -> None:
    place = f"127.0.0.1:{server.server_address[1]}"
    with pytest.raises(OSError, match="error: 404$"):
        fetch(f"http://{place}/open/none.tar").read()
    keep_secret("http://user:TOKEN@127.0.0.1:9/a.tar")
    with pytest.raises(OSError, match="Couldn't connect to server") as caught:
        fetch("http://127.0.0.1:9/a.tar").read()
    assert "TOKEN" not in str(caught.value)
    with pytest.raises(OSError, match=r"127.0.0.1:9/m.json cannot be fetched: .*Couldn't connect"):
        fetch_beside("http://127.0.0.1:9/a.tar", "m.json")


def test_silence_ends_after_the_patience(
    server: http.server.ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An http server, a bucket whose program retries for ever, and a command."""
    gsutil = tmp_path / "bin" / "gsutil"
    gsutil.parent.mkdir()
    gsutil.write_text("#!/bin/sh\necho Retrying request, attempt 11... >&2\nsleep 600\n")
    gsutil.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gsutil.parent}:/usr/bin:/bin")
    monkeypatch.setenv("OFFSPHERE_PATIENCE", "0.3")
    begin = time.monotonic()
    silent = f"http://127.0.0.1:{server.server_address[1]}/silent/a.tar"
    for address in (silent, "gs://bucket/a.tar", "pipe:echo first; sleep 600"):
        with pytest.raises(OSError, match=r"no byte came for 0.3 seconds .OFFSPHERE_PATIENCE"):
            fetch(address).read()
    with pytest.raises(OSError, match=r"manifest.json cannot be fetched: "):
        fetch_beside(silent, "manifest.json")
    assert time.monotonic() - begin < 10


def test_a_command_is_ended_with_its_reader(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    with fetch(f"pipe:echo first; (sleep 1; touch {mark}) & wait") as file:
        assert file.readline() == b"first\n"
    time.sleep(1.3)
    assert not mark.exists()
    with pytest.raises(OSError, match="^no such thing$"):
        fetch("pipe:echo some; echo no such thing >&2; exit 3").read()


def test_the_patience_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience() == 60
    for said in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("OFFSPHERE_PATIENCE", said)
        with pytest.raises(ValueError, match="OFFSPHERE_PATIENCE must be a number of seconds"):
            patience()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("PIPE:touch x #://", "a command is written as pipe:COMMAND"),
        (" pipe:touch x #://", "a command is written as pipe:COMMAND"),
        ("http://127.0.0.1:9/x'; touch y; '.tar", "it holds a space"),
        ("http://h/\x07.tar", "it holds a space"),
        ("http://[::1/x.tar", "Invalid IPv6 URL"),
        ("http://u:TOKEN@h:port/x.tar", "Port could not be cast"),
        ("://x", "expected something like https://HOST/FILE.tar"),
    ],
)
def test_what_is_no_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_address(address)
    assert "TOKEN" not in str(caught.value)


def test_addresses_are_accepted() -> None:
    for address in ("https://h/a%20b.tar", "file:/a b.tar".replace(" ", ""), "pipe:cat 'a b'"):
        check_address(address)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot be opened: there is no file .*/none.tar"):
        fetch(f"file:{tmp_path}/none.tar")
    with pytest.raises(OSError, match="no gopen handler"):
        fetch("s3://bucket/a.tar")
