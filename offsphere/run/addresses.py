"""Data behind addresses: opened with a limited patience, and shown without their secrets.

A user name, a password, a query string or an Authorization header may be a secret. `public` takes
them out. `keep_secret` does so to a setting and remembers the whole address in this process, where
`fetch` alone looks it up: what is printed, recorded or hashed never had the secret in it.
"""

from __future__ import annotations

import io
import os
import re
import select
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

PATIENCE = 60.0
"""Seconds without a byte after which an address is given up, unless OFFSPHERE_PATIENCE says."""
LARGEST_TEXT = 2**27
"""Bytes of a text, such as a manifest, that is read whole."""
CURL_SCHEMES = ("http", "https", "ftp", "ftps", "sftp", "scp")
NOT_THERE = ("401", "403", "404", "410")  # object stores answer 403 for what is not there
CURL_HTTP_ERROR = 22

_real: dict[str, str] = {}


def public(text: str) -> str:
    """The text with the secrets of its addresses left out."""
    text = re.sub(r"([A-Za-z][\w+.-]*://)[^/\s]*@", r"\1", text)
    # A shell joins what follows a closing quote: 'https://HOST/FILE'?key is one address.
    text = re.sub(r"([A-Za-z][\w+.-]*://[^\s?#'\"]*['\"]?)[?#][^\s'\"]*", r"\1", text)
    return re.sub(r"(?i)(authorization\s*[:=]\s*)(?:(?:bearer|basic)\s+)?[^\s'\"]+", r"\1", text)


def keep_secret(address: str) -> str:
    """The public form of an address, under which this process remembers the whole one."""
    shown = public(address)
    if shown != address:
        _real[shown] = address
        _real[shown.removeprefix("wds:")] = address.removeprefix("wds:")
    return shown


def real(address: str) -> str:
    """The whole address that `keep_secret` was given for this public form, if any."""
    return _real.get(address, address)


def patience() -> float:
    """Seconds without a byte after which an address is given up."""
    said = os.environ.get("OFFSPHERE_PATIENCE", "")
    try:
        seconds = float(said) if said else PATIENCE
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 10**6:
        raise ValueError(f"OFFSPHERE_PATIENCE must be a number of seconds above 0, got {said!r}.")
    return seconds


def check_address(address: str) -> None:
    """Refuse what looks like an address but cannot be read as one."""
    shown = public(address)
    if re.match(r"\s*pipe:", address, re.IGNORECASE) and not address.startswith("pipe:"):
        raise ValueError(f"{shown!r}: a command is written as pipe:COMMAND, without a space first.")
    if address.startswith("pipe:"):
        return
    if re.search(r"[\s\x00-\x1f\x7f]", address):
        raise ValueError(f"{shown!r} is no address: it holds a space (as %20 it may).")
    if not re.match(r"file:|[A-Za-z][\w+.-]*://", address):
        raise ValueError(f"{shown!r} is no address: expected something like https://HOST/FILE.tar.")
    try:
        urlsplit(address).port  # noqa: B018 - a port that is no number raises here
    except ValueError as error:
        raise ValueError(f"{shown!r} is no address: {error}.") from None


def fetch(address: str) -> BinaryIO:
    """The open file behind an address; a silence longer than our patience is an error."""
    whole = real(address)
    scheme = whole.partition(":")[0].lower()
    try:
        if scheme in os.environ.get("USE_AIS_FOR", "ais").split(":"):
            return _patient(["ais", "get", whole, "-"], address)
        if scheme in CURL_SCHEMES:
            return _patient(_curl(), address, _curl_settings(url=whole))
        if scheme == "hf":
            return _patient(_curl(), address, _hugging_face(whole))
        if scheme == "gs":
            return _patient(["gsutil", "cat", whole], address)
        if scheme == "pipe":
            return _patient(whole.removeprefix("pipe:"), address)
        if scheme == "file":
            return _local(whole).open("rb")
        from webdataset.gopen import gopen

        return cast("BinaryIO", gopen(whole))
    except Exception as error:  # the hub's own kinds of error among them
        raise OSError(f"{public(address)} cannot be opened: {_line(error)}.") from None


def fetch_beside(address: str, name: str) -> bytes | None:
    """A file of that name beside an http, https or file address; None if it is not there."""
    parts = urlsplit(real(address))
    path = f"{parts.path.rpartition('/')[0]}/{name}"
    beside = urlunsplit(parts._replace(path=path, fragment=""))
    if parts.scheme == "file":
        with suppress(FileNotFoundError), _local(beside).open("rb") as opened:
            return opened.read(LARGEST_TEXT)
        return None
    if parts.scheme.lower() not in ("http", "https"):
        return None
    try:
        command = [*_curl(), "--max-time", f"{patience():g}"]
        with _patient(command, beside, _curl_settings(url=beside)) as text:
            return text.read(LARGEST_TEXT)
    except Refused as error:
        if error.code in NOT_THERE:
            return None
        raise OSError(f"{public(beside)} cannot be fetched: {error}.") from None
    except OSError as error:
        raise OSError(f"{public(beside)} cannot be fetched: {_line(error)}.") from None


class Refused(OSError):
    """A server's answer that is no file, with its code."""

    def __init__(self, code: str, said: str) -> None:
        super().__init__(said)
        self.code = code


def _local(address: str) -> Path:
    """The file of a file: address; what is no regular file could be waited for without end."""
    file = Path(url2pathname(urlsplit(address).path))
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    return file


def _curl() -> list[str]:
    """curl without its address, which it reads from its input: a command line is seen by all."""
    connect = f"{patience() / 2:g}"
    return ["curl", "-fsSLg", "--connect-timeout", connect, "--retry", "2", "--config", "-"]


def _curl_settings(**lines: str) -> bytes:
    quoted = {key: value.replace("\\", "\\\\").replace('"', '\\"') for key, value in lines.items()}
    return "".join(f'{key} = "{value}"\n' for key, value in quoted.items()).encode()


def _hugging_face(address: str) -> bytes:
    """Where the hub keeps the file of an hf:// address, with the user's token if there is one."""
    from huggingface_hub import HfFileSystem, get_token, hf_hub_url

    found: Any = HfFileSystem().resolve_path(address)
    url = hf_hub_url(
        found.repo_id, found.path_in_repo, repo_type=found.repo_type, revision=found.revision
    )
    token = get_token()
    return _curl_settings(
        url=url, **({"header": f"Authorization: Bearer {token}"} if token else {})
    )


def _patient(command: list[str] | str, address: str, said: bytes = b"") -> BinaryIO:
    return cast("BinaryIO", io.BufferedReader(_Output(command, address, said), 2**16))


class _Output(io.RawIOBase):
    """What a command writes; a silence longer than our patience, or a bad end, is an error."""

    def __init__(self, command: list[str] | str, address: str, said: bytes) -> None:
        super().__init__()
        self.address, self.ended, self.seconds = public(address), False, patience()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self.process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            stdin=subprocess.PIPE if said else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            bufsize=0,
            start_new_session=True,  # so that what it started itself ends with it
        )
        if self.process.stdin is not None:
            self.process.stdin.write(said)
            self.process.stdin.close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert self.process.stdout is not None
        if self.ended:
            return 0
        waiting = select.poll()
        waiting.register(self.process.stdout, select.POLLIN)
        if not waiting.poll(self.seconds * 1000):
            self._kill()
            longer = "OFFSPHERE_PATIENCE=SECONDS waits longer"
            raise OSError(f"no byte came for {self.seconds:g} seconds ({longer})")
        content = os.read(self.process.stdout.fileno(), len(buffer))
        buffer[: len(content)] = content
        if not content:
            self.ended = True
            self._check_end()
        return len(content)

    def close(self) -> None:
        """End the command, whether or not it was read to its end."""
        if not self.closed:
            self._kill()
            self.errors.close()
        super().close()

    def _kill(self) -> None:
        self.ended = True
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _check_end(self) -> None:
        code = self.process.wait()
        if code == 0:
            return
        self.errors.seek(0)
        lines = public(self.errors.read(2**16).decode(errors="replace")).strip().splitlines()
        said = lines[-1].rstrip(".") if lines else f"exit code {code}"
        answer = re.search(r"returned error: (\d+)", said)
        if code == CURL_HTTP_ERROR and answer is not None:
            raise Refused(answer[1], said)
        raise OSError(said)


def _line(error: Exception) -> str:
    """What an error says, in one line and without secrets."""
    lines = public(str(error)).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
