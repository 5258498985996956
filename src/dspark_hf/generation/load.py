"""The load on a target: rows that the running `generate()` calls of this process decode on it."""

import threading
import weakref
from contextlib import contextmanager


class Load:
    """Rows that the other running `generate()` calls of this process decode on a target, with a draft or without."""

    def __init__(self):
        self._lock = threading.Lock()
        self._targets: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @contextmanager
    def call(self, target):
        """Registers a call of this thread; yields a function that sets its running rows and returns the others'."""
        token, thread = object(), threading.get_ident()
        with self._lock:
            running = self._targets.setdefault(target, _Running())
            if not running.calls:
                running.hook = target.register_forward_pre_hook(running.see, with_kwargs=True)
            running.calls[token] = 0
            outer = running.call_of_thread.get(thread)
            running.call_of_thread[thread] = token
        asked = [running.clock] * 2

        def update(rows: int) -> int:
            running.calls[token] = rows
            running.clock += 1
            since = asked.pop(0)
            asked.append(running.clock)
            return sum(list(running.calls.values())) - rows + running.rows_without_draft(since)

        try:
            yield update
        finally:
            with self._lock:
                del running.calls[token]
                running.call_of_thread[thread] = outer
                if outer is None:
                    del running.call_of_thread[thread]
                if not running.calls:
                    running.hook.remove()


class _Running:
    """What runs on one target. The clock counts the rounds of all registered calls."""

    def __init__(self):
        self.calls: dict[object, int] = {}  # rows of each registered call
        self.call_of_thread: dict[int, object] = {}
        self.others: dict[int, tuple[int, int]] = {}  # thread: rows of its last forward, and when that was
        self.clock = 0
        self.hook = None

    def see(self, module, args, kwargs) -> None:
        """Before each forward of the target: calls that are not registered show themselves by it."""
        inputs = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        inputs = args[0] if inputs is None and args else inputs
        if inputs is None:
            return
        thread = threading.get_ident()
        token = self.call_of_thread.get(thread)
        if token is None:
            self.others[thread] = (inputs.shape[0], self.clock)
        elif self.calls[token] == 0:
            self.calls[token] = inputs.shape[0]  # still at its prompt

    def rows_without_draft(self, since: int) -> int:
        """Rows of threads that have used the target since then; the rest are forgotten."""
        for thread, (_, seen) in list(self.others.items()):
            if seen < since:
                self.others.pop(thread, None)
        return sum(rows for rows, _ in list(self.others.values()))


LOAD = Load()
