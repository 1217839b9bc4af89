"""What processes do together meets, or fails by name, and later attempts meet again."""

import itertools
import threading

import pytest

from jax_moe._meeting import Meeting

_places = itertools.count()


class Store:
    """As the coordination service's client."""

    def __init__(self):
        self.lock, self.values = threading.Lock(), {}

    def key_value_set(self, key, value):
        assert value
        with self.lock:
            assert key not in self.values, f"{key} already exists"
            self.values[key] = value

    def key_value_dir_get(self, prefix):
        with self.lock:
            return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]


@pytest.fixture
def attempt():
    """attempt({process: (what, messages, timeout_s)}): runs them at once; what each got."""
    store, place = Store(), f"test/{next(_places)}"

    def one(process, what, messages, timeout_s, results):
        got = []
        try:
            with Meeting(
                place, what, [0, 1, 2], timeout_s, process=process, client=store
            ) as meeting:
                for phase, message in enumerate(messages):
                    if isinstance(message, Exception):
                        raise message
                    got.append(meeting.gather(f"phase{phase}", message))
        except (RuntimeError, MemoryError) as error:
            got.append(error)
        results[process] = got

    def run(processes):
        results = {}
        threads = [
            threading.Thread(target=one, args=(process, *arguments, results))
            for process, arguments in processes.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run


def _sound(attempt):
    results = attempt({p: ("work", [f"a{p}", f"b{p}", ""], 20.0) for p in range(3)})
    assert all(
        got == [["a0", "a1", "a2"], ["b0", "b1", "b2"], [""] * 3] for got in results.values()
    )


def test_everybody_gets_all_messages(attempt):
    _sound(attempt)
    _sound(attempt)


def test_a_missing_process_is_named_and_may_come_later(attempt):
    results = attempt({p: ("work", ["x"], 0.2) for p in (0, 2)})
    first = str(results[0][0])
    assert first.startswith("work: process")
    # Whoever was late first told the other.
    assert any("process(es) 1 did not come within 0.2 s" in str(got[0]) for got in results.values())
    (late,) = attempt({1: ("work", ["x"], 0.2)}).values()
    assert "did not come within" in str(late[0])
    assert "had given up before: work" in str(late[0])
    _sound(attempt)


def test_a_process_that_gives_up_ends_the_others_at_once(attempt):
    processes = {p: ("work", ["x", "y"], 60.0) for p in (0, 1)}
    results = attempt(processes | {2: ("work", ["x", MemoryError("no room")], 60.0)})
    assert results[0][0] == ["x"] * 3
    for process in (0, 1):
        # Directly, or from the one that heard it first.
        assert "gave up" in str(results[process][1])
    assert any("process 2 gave up: no room" in str(results[p][1]) for p in (0, 1))
    _sound(attempt)


def test_different_calls_are_told_apart(attempt):
    processes = {p: ("closing", ["x"], 60.0) for p in (0, 1)}
    results = attempt(processes | {2: ("rebuilding", ["x"], 60.0)})
    texts = [str(results[p][-1]) for p in range(3)]
    assert any("came to rebuilding" in text or "came to closing" in text for text in texts)
    assert all("same calls" in text or "gave up" in text for text in texts)
    _sound(attempt)


def test_a_call_with_nothing_to_gather_is_no_attempt(attempt):
    attempt({0: ("work", [], 1.0)})
    _sound(attempt)
