"""`Handle`: an asynchronous collective, to be waited for."""

from __future__ import annotations

from tensorgrad.parallel.comm.transport import Finish


class Handle:
    """A pending call: `wait` before reading its results or writing its arrays.

    Args:
        finish: finishes the call; called once. None: the call is done already.
        open_handles: holds this handle, and so the arrays, until `wait` is called.

    Example:
        >>> x = np.array([1.0, 2.0])
        >>> handle: tg.parallel.Handle = tg.parallel.world().all_reduce(x, wait=False)
        >>> y = np.exp(x.size)  # meanwhile
        >>> handle.wait()
        >>> x
        array([1., 2.])
    """

    __slots__ = ("__weakref__", "_finish", "_open")

    def __init__(self, finish: Finish | None = None, open_handles: set[Handle] | None = None):
        """Create the handle of a call, or of one that is done already.

        Args:
            finish: finishes the call; called once.
            open_handles: holds this handle, and so the arrays, until `wait` is called.
        """
        self._finish, self._open = finish, open_handles
        if open_handles is not None:
            open_handles.add(self)

    def wait(self) -> None:
        """Finish the call. Waiting again does nothing.

        For NumPy arrays it returns when the call is done. For CuPy arrays the current stream
        waits, not the host: work that is submitted to the stream from now on runs after the call.

        Raises:
            CommError: the network fails, or `recv` gets another array than it expects.
        """
        finish = self._finish
        self.abandon()
        if finish is not None:
            finish()

    def abandon(self) -> None:
        """Never wait: the call was part of a CUDA graph that was not completed."""
        self._finish = None
        if self._open is not None:
            self._open.discard(self)
