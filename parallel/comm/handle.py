"""`Handle`: a collective that was begun and not yet waited for."""

from __future__ import annotations

from tensorgrad.parallel.comm.transport import Finish


class Handle:
    """A call that was begun: `wait` before its results are read or its arrays written."""

    __slots__ = ("__weakref__", "_finish", "_open")

    def __init__(self, finish: Finish | None = None, open_handles: set[Handle] | None = None):
        """Take over how to finish the call, if anything is left to do.

        Args:
            finish: called once.
            open_handles: holds this handle, and with it the arrays, until it is waited for.
        """
        self._finish, self._open = finish, open_handles
        if open_handles is not None:
            open_handles.add(self)

    def wait(self) -> None:
        """Finish the call. Waiting again does nothing.

        For NumPy arrays it returns when the call is done. For CuPy arrays the current stream
        waits, not the host: the call is done before work that is given to the stream from now on.

        Raises:
            CommError: the network fails, or `recv` gets something else than it expects.
        """
        finish, self._finish = self._finish, None
        if self._open is not None:
            self._open.discard(self)
        if finish is not None:
            finish()
