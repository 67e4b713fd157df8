"""Files that change under the picker: endpoints, and the configuration itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.app.config import load_file
from picker.app.reload import ConfigFile
from picker.core.strict import ConfigError
from picker.io.discovery.endpoint_file import EndpointFile
from picker.io.discovery.endpoint_list import MOST_BYTES, MOST_ENDPOINTS, parse
from picker.io.file_watch import FileError, WatchedFile, read_file

POLL = 0.02


def entries(*addresses: str) -> str:
    return json.dumps([{"address": address} for address in addresses])


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(file: WatchedFile[Any]) -> AsyncIterator[list[Any]]:
    seen: list[Any] = []
    task = asyncio.create_task(file.run(seen.append))
    try:
        yield seen
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def addresses(endpoints: list[Any]) -> list[str]:
    return [endpoint.address for endpoint in endpoints]


async def test_endpoints_follow_the_file_written_in_place_or_replaced(tmp_path: Path):
    path = tmp_path / "endpoints.yaml"
    path.write_text(entries("10.0.0.1:80"))
    file = EndpointFile(path, poll_seconds=POLL)
    async with watching(file) as seen:
        await until(lambda: len(seen) == 1)
        path.write_text(entries("10.0.0.2:80"))  # as long as before
        await until(lambda: len(seen) == 2)
        (tmp_path / "new").write_text("endpoints:\n- {address: '[::1]:80', name: a}\n")
        (tmp_path / "new").replace(path)
        await until(lambda: len(seen) == 3)
    assert [addresses(each) for each in seen] == [["10.0.0.1:80"], ["10.0.0.2:80"], ["[::1]:80"]]
    assert file.reloads == 3
    assert file.refused == {}


async def test_a_kubernetes_mount_swaps_symbolic_links(tmp_path: Path):
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "endpoints.yaml").write_text(entries(f"10.0.0.{version}:80"))
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "endpoints.yaml").symlink_to("..data/endpoints.yaml")
    async with watching(EndpointFile(tmp_path / "endpoints.yaml", poll_seconds=POLL)) as seen:
        await until(lambda: seen)
        (tmp_path / "..data_tmp").symlink_to("2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        await until(lambda: len(seen) == 2)
    assert addresses(seen[1]) == ["10.0.0.2:80"]


async def test_what_is_no_good_is_refused_once_and_the_endpoints_stay(tmp_path: Path):
    path = tmp_path / "endpoints.yaml"
    path.write_text(entries("10.0.0.1:80"))
    file = EndpointFile(path, poll_seconds=POLL)
    async with watching(file) as seen:
        await until(lambda: seen)
        path.unlink()
        await until(lambda: file.refused["missing"])
        path.write_text("")
        await until(lambda: file.refused["invalid"])
        path.write_text(entries("10.0.0.1:80", "10.0.0.2:80")[:-5])
        await until(lambda: file.refused["invalid"] == 2)
        assert "is not YAML" in file.last_error
        path.write_text(" " * (MOST_BYTES + 1))
        await until(lambda: file.refused["too_large"])
        path.unlink()
        path.mkdir()
        await until(lambda: file.refused["unreadable"])
        await asyncio.sleep(5 * POLL)
        assert len(seen) == 1
        path.rmdir()
        path.write_text(entries("10.0.0.3:80"))
        await until(lambda: len(seen) == 2)
    assert addresses(seen[1]) == ["10.0.0.3:80"]
    assert file.refused["unreadable"] == file.refused["too_large"] == 1
    assert file.last_error == ""


async def test_a_file_that_comes_back_unchanged_is_good_again(tmp_path: Path):
    path = tmp_path / "endpoints.yaml"
    path.write_text(entries("10.0.0.1:80"))
    os.utime(path, (1, 1))
    file = EndpointFile(path, poll_seconds=POLL)
    async with watching(file) as seen:
        await until(lambda: seen)
        path.rename(tmp_path / "away")
        await until(lambda: file.refused["missing"])
        (tmp_path / "away").rename(path)
        await until(lambda: len(seen) == 2)
    assert file.last_error == ""
    assert seen[0] == seen[1]


async def test_a_file_that_is_being_written_waits_for_its_writer(tmp_path: Path):
    path = tmp_path / "endpoints.yaml"
    path.write_text("[]")
    whole = "".join(f"- {{address: '10.0.0.{number}:80'}}\n" for number in range(1, 41))

    def write_slowly() -> None:
        with path.open("w") as out:
            for line in whole.splitlines(keepends=True):
                out.write(line)
                out.flush()  # each prefix is a valid list of endpoints
                time.sleep(0.01)

    async with watching(EndpointFile(path, poll_seconds=POLL)) as seen:
        await until(lambda: seen)
        await asyncio.to_thread(write_slowly)
        await until(lambda: len(seen) > 1 and len(seen[-1]) == 40)


async def test_check_now_does_not_wait_for_the_poll(tmp_path: Path):
    path = tmp_path / "endpoints.yaml"
    path.write_text("[]")
    file = EndpointFile(path, poll_seconds=3600)
    async with watching(file) as seen:
        await until(lambda: seen)
        path.write_text(entries("10.0.0.1:80"))
        file.check_now()
        await until(lambda: len(seen) == 2)


async def test_check_now_says_again_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "endpoints.yaml"
    file = EndpointFile(path, poll_seconds=POLL)
    said: list[str] = []

    def again() -> bool:
        said.extend(line for line in capsys.readouterr().out.splitlines() if "still refused" in line)
        return bool(said)

    async with watching(file) as seen:
        await until(lambda: file.refused["missing"])
        file.check_now()
        await until(again)
        assert "does not exist" in said[0]
        path.write_text("[{address: nowhere}]")
        await until(lambda: file.refused["invalid"])
        said.clear()
        file.check_now()
        await until(again)
        assert "nowhere" in said[0]
        said.clear()
        await asyncio.sleep(5 * POLL)
        assert not again()
        path.write_text(entries("10.0.0.1:80"))
        await until(lambda: seen)
        file.check_now()
        await asyncio.sleep(5 * POLL)
        assert not again()
    assert file.refused == {"missing": 1, "invalid": 1}


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    errors: list[FileError] = []

    def read() -> None:
        try:
            read_file(tmp_path / "pipe", 10)
        except FileError as error:
            errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(5)
    assert [error.reason for error in errors] == ["unreadable"]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("", "is empty; write [] for no endpoints"),
        ("endpoints:", "endpoints: null: expected a list, got null"),
        ("{}", "endpoints: is missing"),
        ("{endpoint: []}", 'endpoint: []: unknown key; did you mean "endpoints"?'),
        ("text", '"text": expected a mapping, got text'),
        ("[{address: '10.0.0.1:80', labels: {a: 1}}]", "endpoints[0].labels.a: 1: expected text, got int; put it in"),
        ("[{address: '10.0.0.1:80', engine: vlm}]", 'endpoints[0].engine: "vlm": is none of vllm, sglang'),
        ("[{address: '10.0.0.1:80', name: 'a b'}]", 'endpoints[0].name: "a b": does not match'),
        (entries("10.0.0.1:80", "10.0.0.1:80"), 'endpoints[1].address: "10.0.0.1:80": is the address of endpoints[0]'),
        (
            "[{address: '10.0.0.1:80', name: a}, {address: '10.0.0.2:80', name: a}]",
            'endpoints[1].name: "a": is the name of endpoints[0] too; give them different names',
        ),
    ],
)
def test_unusable_endpoint_files(document: str, problem: str):
    with pytest.raises(ConfigError) as caught:
        parse(document)
    assert str(caught.value.problems[0]).startswith(problem)


def test_too_many_endpoints_are_refused():
    many = [f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:80" for number in range(MOST_ENDPOINTS + 1)]
    with pytest.raises(ConfigError, match=r"endpoints: has 10001 entries; at most 10000"):
        parse(entries(*many))
    assert len(parse(entries(*many[1:]))) == MOST_ENDPOINTS


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.just("10.0.0.1:80"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["endpoints", "address", "name", "labels"]), inner, max_size=3)
        ),
        max_leaves=10,
    ).map(json.dumps)
)
def test_any_file_gives_endpoints_or_a_configuration_error(document: str | bytes):
    try:
        endpoints = parse(document)
    except ConfigError:
        return
    assert len({endpoint.address for endpoint in endpoints}) == len(endpoints)


async def test_the_configuration_is_reloaded_when_it_changes_and_kept_when_it_is_bad(tmp_path: Path):
    path = tmp_path / "picker.yaml"
    path.write_text("exchange: {fallbacks: 1}")
    file = ConfigFile(path, load_file(path).config, poll_seconds=POLL)
    async with watching(file) as seen:
        await until(lambda: file.reloads)
        path.write_text("exchange: {fallbacks: 1} # a comment is no change")
        await until(lambda: file.reloads == 2)
        path.write_text("exchange: {fallback: 2}")
        await until(lambda: file.refused["invalid"])
        path.write_text("")  # as some editors do, before they write
        await until(lambda: file.refused["invalid"] == 2)
        assert seen == []
        path.write_text("exchange: {fallback: 2}")
        await until(lambda: file.refused["invalid"] == 3)
        assert file.last_error == 'exchange.fallback: 2: unknown key; did you mean "fallbacks"?'
        path.write_text("exchange: {fallbacks: 3}")
        await until(lambda: seen)
    assert [loaded.config.exchange.fallbacks for loaded in seen] == [3]


async def test_sighup_looks_at_the_configuration_at_once(tmp_path: Path):
    path = tmp_path / "picker.yaml"
    path.write_text("{}")
    before = signal.getsignal(signal.SIGHUP)
    async with watching(ConfigFile(path, load_file(path).config, poll_seconds=3600)) as seen:
        await asyncio.sleep(0.1)
        path.write_text("log: {level: debug}")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: seen)
    assert seen[0].config.log.level == "debug"
    assert signal.getsignal(signal.SIGHUP) == before


async def test_changes_that_need_a_restart_are_named_until_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "picker.yaml"
    path.write_text("{}")
    file = ConfigFile(path, load_file(path).config, poll_seconds=POLL)
    async with watching(file) as seen:
        path.write_text("listen: {http: '127.0.0.1:1', drainSeconds: 5}")
        await until(lambda: len(seen) == 1)
        path.write_text("listen: {http: '127.0.0.1:1', drainSeconds: 5}\nlog: {level: debug}")
        await until(lambda: len(seen) == 2)
        assert file.needs_restart == ["listen.http"]
        path.write_text("log: {level: debug}")
        await until(lambda: len(seen) == 3)
        assert file.needs_restart == []
    assert [loaded.config.listen.http for loaded in seen] == ["0.0.0.0:9090"] * 3
    assert [loaded.config.listen.drain_seconds for loaded in seen] == [5, 5, 30]
    assert capsys.readouterr().out.count("listen.http") == 2
