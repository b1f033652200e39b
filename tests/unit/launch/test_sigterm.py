"""SIGTERM is remembered from the first moment on, and handed over to whoever listens later."""

import os
import signal
import threading

from ultrascale_jax.launch.sigterm import SignalListener, listener


def test_a_signal_is_remembered_inside_the_block_only():
    before = signal.getsignal(signal.SIGTERM)
    with SignalListener() as sigterm:
        assert listener() is sigterm and not sigterm.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert sigterm.received
    assert signal.getsignal(signal.SIGTERM) is before and listener() is None


def test_what_came_before_is_handed_over_and_the_new_handler_stays():
    before, heard = signal.getsignal(signal.SIGTERM), []
    try:
        for told in (False, True):
            with SignalListener() as sigterm:
                if told:
                    os.kill(os.getpid(), signal.SIGTERM)
                new = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
                assert new is sigterm
                sigterm.hand_over()
            assert len(heard) == told and signal.getsignal(signal.SIGTERM) is not before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_the_process_keeps_its_own_handler():
    before, handlers = signal.getsignal(signal.SIGTERM), []

    def listen():
        with SignalListener():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert handlers == [before]
