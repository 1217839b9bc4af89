"""A process that is watched and does nothing: watched.py INDEX FOLDER DEAD_S STALL_S [ACT STEP].

It takes steps for ever, or at the step given acts: "stick" takes no more, "fail" and "lose" end
with an error, of its own or another's; "end" ends well.
"""

import pathlib
import sys
import time

from train.watch import Watch


class Client:
    """A coordination service made of files."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def key_value_set(self, key, value):
        path = self.folder / key.replace("/", "_")
        path.with_suffix(".part").write_text(value)
        path.with_suffix(".part").rename(path)

    def blocking_key_value_get(self, key, timeout_ms):
        path = self.folder / key.replace("/", "_")
        while not path.exists():
            time.sleep(0.02)
        return path.read_text()


def main():
    index, folder, dead_s, stall_s, *rest = sys.argv[1:]
    act, at = (rest[0], int(rest[1])) if rest else ("", -1)
    watch = Watch(int(index), Client(folder), "127.0.0.1", float(dead_s), float(stall_s))
    for step in range(1, 3000):
        watch.note(step, "running the step")
        print(f"step {step}, watched by {watch._process.pid}", flush=True)
        while step == at and act == "stick":
            time.sleep(1)
        if step == at:
            if act == "end":
                watch.close()
            else:
                watch.fail("failed: something: no", lost=act == "lose")
            return act != "end"
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
