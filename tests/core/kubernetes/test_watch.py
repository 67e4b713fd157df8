"""A watch against a model of an API server: whatever goes wrong, and in which order, the copy ends up right."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.core.kubernetes.objects import MalformedError, Named, Status, decode
from picker.core.kubernetes.watch import Failure, Watch, WatchSettings
from tests.support.fake_kubernetes.resources import BUILT_IN
from tests.support.fake_kubernetes.selectors import selects
from tests.support.fake_kubernetes.storage import ApiError, Storage
from tests.support.fake_kubernetes.streams import bookmark_line, frame_line

PODS = next(resource for resource in BUILT_IN if resource.plural == "pods")
SELECTION = {"labelSelector": "app=model"}
MATCHES = selects("app=model", "")


def read(data):
    """What the tests keep of an object: a number."""
    found = json.loads(bytes(data))
    if "number" not in found:
        raise MalformedError("no number")
    return found["number"]


def pod(name, number, app="model"):
    return {"metadata": {"name": name, "labels": {"app": app}}, "number": number}


def page_of(storage, *, token="", limit=0):
    page = storage.list(PODS, "", MATCHES, limit, token)
    metadata = {"resourceVersion": str(page.revision), **({"continue": page.more} if page.more else {})}
    return json.dumps({"kind": "PodList", "metadata": metadata, "items": page.items}).encode()


def new_watch(**more):
    return Watch(read, SELECTION, WatchSettings(**more), random.Random(1))


@pytest.fixture
def storage():
    made = Storage(BUILT_IN)
    for number in range(5):
        made.put(PODS, "n", pod(f"pod-{number}", number))
    made.put(PODS, "n", pod("other", 9, app="other"))
    return made


def listed(storage, **more):
    watch = new_watch(**more)
    watch.ask(0.0)
    assert watch.page(page_of(storage), 0.0)
    return watch


def test_what_is_asked_for(storage):
    watch = new_watch()
    get = watch.ask(0.0)
    assert (get.stream, get.pause) == (False, 0.0)
    assert get.query == {"labelSelector": "app=model", "limit": "100"}
    assert not watch.synced
    assert watch.page(page_of(storage), 1.0)
    assert watch.synced
    assert watch.objects == {f"n/pod-{number}": number for number in range(5)}
    get = watch.ask(1.0)
    assert get.stream
    seconds = int(get.query["timeoutSeconds"])
    assert 150 <= seconds <= 300
    assert get.query == {
        **SELECTION,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": str(storage.revision),
        "timeoutSeconds": str(seconds),
    }


def test_pages_are_one_list(storage):
    watch = new_watch()
    body = page_of(storage, limit=2)
    token = json.loads(body)["metadata"]["continue"]
    assert not watch.page(body, 0.0)
    assert (watch.synced, watch.objects) == (False, {})
    storage.delete(PODS, "n", "pod-4")  # the list is of the revision of its first page
    assert watch.ask(0.0).query["continue"] == token
    body = page_of(storage, limit=2, token=token)
    watch.page(body, 0.0)
    watch.page(page_of(storage, limit=2, token=json.loads(body)["metadata"]["continue"]), 0.0)
    assert len(watch.objects) == 5
    assert watch.ask(0.0).query["resourceVersion"] == str(storage.revision - 1)


def test_a_page_that_is_gone_begins_the_list_anew(storage):
    watch = new_watch()
    watch.page(page_of(storage, limit=2), 0.0)
    watch.refused(410, Status(410, "Expired"), None, 0.0)
    assert "continue" not in watch.ask(0.0).query
    watch.page(page_of(storage), 0.0)
    assert len(watch.objects) == 5


def test_a_page_that_fails_is_asked_for_again(storage):
    watch = new_watch()
    body = page_of(storage, limit=2)
    watch.page(body, 0.0)
    watch.failed(Failure.CUT, "broke off", 0.0)
    assert watch.ask(0.0).query["continue"] == json.loads(body)["metadata"]["continue"]


def test_frames_change_the_copy_and_move_the_version_on(storage):
    watch = listed(storage)
    watch.ask(0.0)
    before = storage.revision
    storage.put(PODS, "n", pod("pod-0", 100))
    storage.put(PODS, "n", pod("new", 7))
    storage.put(PODS, "n", pod("pod-1", 1, app="other"))  # leaves the selection
    storage.delete(PODS, "n", "pod-2")
    storage.put(PODS, "n", pod("other", 10, app="other"))  # is seen by nobody
    frames = list(storage.since(PODS, "", MATCHES, before))
    assert [kind for kind, _ in frames] == ["MODIFIED", "ADDED", "DELETED", "DELETED"]
    assert [watch.frame(frame_line(*frame, PODS), 5.0) for frame in frames] == [(True, True)] * 4
    assert watch.objects == {"n/pod-0": 100, "n/pod-3": 3, "n/pod-4": 4, "n/new": 7}
    watch.closed(5.0)
    assert watch.ask(5.0).query["resourceVersion"] == str(storage.revision - 1)
    watch.frame(bookmark_line(PODS, storage.revision), 6.0)
    assert watch.confirmed_at == 6.0
    watch.closed(6.0)
    assert watch.ask(6.0).query["resourceVersion"] == str(storage.revision)


def test_a_frame_that_changes_nothing_says_so(storage):
    watch = listed(storage)
    assert watch.frame(frame_line("MODIFIED", storage.get(PODS, "n", "pod-0"), PODS), 0.0) == (False, True)
    assert watch.frame(b'{"type": "STARTED", "object": {"metadata": {"name": "x"}}}', 0.0) == (False, True)
    assert watch.failures["unknown_frame"] == 1


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": null}',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "9"}}}',
        b'{"type": "DELETED", "object": {"metadata": {"name": 7}}}',
        b'{"type": "BOOKMARK", "object": {}}',
        b'{"type": "ERROR", "object": []}',
        b'{"type": "ADDED", "object": ' + b"[" * 100_000,
        b'{"type": "\xff", "object": {}}',
    ],
)
def test_what_is_no_frame_ends_in_a_new_list(storage, line):
    watch = listed(storage)
    assert watch.frame(line, 0.0) == (False, False)
    assert watch.failures == {"malformed": 1}
    assert not watch.ask(0.0).stream
    assert len(watch.objects) == 5


def test_an_object_that_cannot_be_used_is_not_there(storage):
    watch = listed(storage)
    broken = {key: value for key, value in storage.get(PODS, "n", "pod-0").items() if key != "number"}
    assert watch.frame(frame_line("MODIFIED", broken, PODS), 0.0) == (True, True)
    assert "n/pod-0" not in watch.objects
    assert watch.failures == {"unusable_object": 1}
    nameless = b'{"metadata": {"resourceVersion": "1"}, "items": [{}, null, {"metadata": {"name": "a"}, "number": 1}]}'
    assert watch.page(nameless, 0.0)
    assert watch.objects == {"/a": 1}


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"metadata": {}, "items": []}', b'{"metadata": {"resourceVersion": "0"}}']
)
def test_what_is_no_list_leaves_the_copy_alone(storage, body):
    watch = listed(storage)
    assert not watch.page(body, 0.0)
    assert watch.failures == {"malformed": 1}
    assert len(watch.objects) == 5


@pytest.mark.parametrize("kind", ["status", "frame"])
@pytest.mark.parametrize(
    ("code", "failure", "lists"),
    [
        (410, Failure.EXPIRED, True),
        (401, Failure.UNAUTHORIZED, False),
        (403, Failure.FORBIDDEN, False),
        (404, Failure.NOT_FOUND, False),
        (429, Failure.THROTTLED, False),
        (500, Failure.SERVER_ERROR, False),
        (504, Failure.SERVER_ERROR, False),
        (400, Failure.REFUSED, False),
    ],
)
def test_refusals(storage, kind, code, failure, lists):
    watch = listed(storage)
    watch.ask(0.0)
    status = ApiError(code, "Reason", "the message", 3).status
    if kind == "status":
        watch.refused(code, decode(json.dumps(status).encode(), Status), None, 0.0)
    else:
        line = json.dumps({"type": "ERROR", "object": status}).encode()
        assert watch.frame(line, 0.0) == (False, False)
    assert watch.failures == {failure: 1}
    assert watch.problem == f"{code} Reason: the message"
    get = watch.ask(0.0)
    assert get.stream != lists
    assert 3 <= get.pause <= 3.75  # as the server asked
    assert len(watch.objects) == 5


def test_pauses_double_up_to_the_longest_and_are_not_in_step(storage):
    watch = listed(storage, shortest_pause=0.1, longest_pause=5.0)
    pauses = []
    for _ in range(12):
        watch.failed(Failure.UNREACHABLE, "down", 0.0)
        pauses.append(watch.ask(0.0).pause)
    for number, pause in enumerate(pauses):
        full = min(0.1 * 2**number, 5.0)
        assert full / 2 <= pause <= full
    assert len(set(pauses)) == len(pauses)
    assert new_watch().ask(0.0).pause == 0.0
    watch.refused(503, Status(), 10_000.0, 0.0)
    assert 30 <= watch.ask(0.0).pause <= 37.5


def test_lists_that_work_do_not_excuse_watches_that_never_do(storage):
    watch = listed(storage)
    pauses = []
    for _ in range(20):
        get = watch.ask(0.0)
        pauses.append(get.pause)
        if get.stream:
            watch.refused(403, Status(), None, 0.0)
        else:
            watch.page(page_of(storage), 0.0)
    assert sum(pauses) > 8


def test_a_watch_of_which_nothing_comes_is_not_trusted_forever(storage):
    watch = listed(storage)
    for _ in range(3):
        assert watch.ask(0.0).stream
        watch.refused(504, Status(504, "Timeout", "Too large resource version"), None, 0.0)
    assert not watch.ask(0.0).stream


def test_silence_ends_in_a_new_list(storage):
    watch = listed(storage)
    watch.failed(Failure.SILENT, "nothing came", 100.0)
    assert not watch.ask(100.0).stream


def test_streams_that_end_in_peace_are_taken_up_at_once(storage):
    watch = listed(storage)
    now = 0.0
    for _ in range(50):
        assert watch.ask(now).stream
        now += 200.0
        watch.frame(bookmark_line(PODS, storage.revision), now)
        watch.closed(now)
        assert watch.ask(now).pause <= 0.1
        if now > 1500:
            break
    assert watch.lists == 1


def test_the_copy_is_listed_anew_now_and_then(storage):
    watch = listed(storage, relist=1800.0)
    assert watch.ask(1799.0).stream
    assert not watch.ask(1800.0).stream


def test_memory_does_not_grow_with_events(storage):
    watch = listed(storage)
    line = frame_line("ADDED", storage.get(PODS, "n", "pod-0"), PODS)
    for number in range(2000):
        watch.frame(line.replace(b'"pod-0"', b'"pod-%d"' % number), 0.0)
        watch.frame(line.replace(b'"pod-0"', b'"pod-%d"' % number).replace(b"ADDED", b"DELETED"), 0.0)
    assert watch.objects == {}
    many = {"metadata": {"resourceVersion": "5"}, "items": [pod(f"p{number}", 1) for number in range(10_100)]}
    watch.page(json.dumps(many).encode(), 0.0)
    assert len(watch.objects) == 10_000
    assert watch.failures["too_many_objects"] == 100


NAMES = [f"pod-{number}" for number in range(6)]
WRITES = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(0, 3), st.sampled_from(["model", "other"])),
    st.tuples(st.just("delete"), st.sampled_from(NAMES)),
    st.just(("compact",)),
)
FAULTS = st.sampled_from(
    [
        "fine",
        "refused",
        "unreachable",
        "cut",
        "silent",
        "malformed",
        "hidden",
        "closed",
        "gone",
        "restored",
        "throttled",
    ]
)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(FAULTS, st.lists(WRITES, max_size=4), st.integers(0, 6)), max_size=25),
    st.randoms(use_true_random=False),
)
def test_any_sequence_of_faults_ends_with_what_the_server_has(script, rng):
    storage = Storage(BUILT_IN)
    watch = Watch(read, SELECTION, WatchSettings(), rng)
    now = 0.0

    def write(action, *arguments):
        if action == "put":
            name, number, app = arguments
            storage.put(PODS, "n", pod(name, number, app))
        elif action == "compact":
            storage.compact()
        elif arguments[0] in {found["metadata"]["name"] for found in storage.all(PODS)}:
            storage.delete(PODS, "n", arguments[0])

    def serve(fault, writes, most):
        """One request and what comes of it; `most` frames are sent at most when something goes wrong."""
        nonlocal now
        get = watch.ask(now)
        now += get.pause
        if fault in {"unreachable", "refused", "throttled"}:
            for one in writes:
                write(*one)
            if fault == "unreachable":
                watch.failed(Failure.UNREACHABLE, fault, now)
            else:
                watch.refused(429 if fault == "throttled" else 403, Status(), None, now)
            return
        if not get.stream:
            try:
                body = page_of(storage, token=get.query.get("continue", ""), limit=2)
            except ApiError as error:
                watch.refused(error.code, Status(), None, now)
            else:
                watch.page(body if fault != "malformed" else body[:-1], now)
            for one in writes:
                write(*one)
            return
        revision = int(get.query["resourceVersion"])
        for one in writes:
            write(*one)
        try:
            frames = [frame_line(*frame, PODS) for frame in storage.since(PODS, "", MATCHES, revision)]
        except ApiError as error:
            watch.frame(json.dumps({"type": "ERROR", "object": error.status}).encode(), now)
            return
        if fault == "fine":
            frames.append(bookmark_line(PODS, storage.revision))
        else:
            frames = frames[:most]
        for line in frames:
            watch.frame(line, now)
        match fault:
            case "cut":
                watch.failed(Failure.CUT, fault, now)
            case "silent":
                watch.failed(Failure.SILENT, fault, now)
            case "malformed":
                watch.frame(line[: len(line) // 2] if frames else b"{", now)
            case "gone":
                watch.frame(json.dumps({"type": "ERROR", "object": ApiError(410, "Expired", "").status}).encode(), now)
            case "restored":  # from a backup, with versions that no client has seen, as is required
                storage.revision += 1000
                storage.compact()
                watch.closed(now)
            case _:
                watch.closed(now)

    for fault, writes, most in script:
        serve(fault, writes, most)
    for _ in range(12):
        serve("fine", [], 0)
    assert watch.synced
    assert watch.problem == ""
    assert watch.objects == {
        f"n/{found['metadata']['name']}": found["number"] for found in storage.all(PODS) if MATCHES(found)
    }


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.text(max_size=5) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "object", "metadata", "name", "items", "resourceVersion", "continue", "ADDED"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(lambda found: json.dumps(found).encode())
)
def test_nothing_that_comes_breaks_a_watch(data):
    watch = new_watch()
    watch.page(data, 0.0)
    watch.frame(data, 0.0)
    watch.page(b'{"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}, "number": 1}]}', 1.0)
    assert watch.objects == {"/a": 1}


def test_a_named_object_is_known_by_namespace_and_name():
    assert decode(b'{"metadata": {"name": "a", "namespace": "n"}}', Named).metadata.key == "n/a"
