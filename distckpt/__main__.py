"""`distckpt` and `python -m distckpt` are the command line."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command line of this process. Ctrl-C ends it without a traceback, even while modules
    are imported.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # While a verb runs Ctrl-C raises, see `distckpt.cli`. Before and after there is nothing to
        # clean up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from distckpt import cli

    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
