"""Set-up of a loader's worker processes: priority, threads, and signals that are meant for the process above them."""

import multiprocessing
import os
import signal
import threading

import cv2

_NICE = 5
"""Lower priority of worker processes beside a GPU: where they use all cores, the process that queues its work comes
first, and the GPU does not wait for it."""


def init_worker(worker: int, *, beside_gpu: bool = False) -> None:
    """Set up a loader's worker process (`worker_init_fn` of torch's DataLoader).

    Training stops after its step, which needs its workers. torchrun and Ctrl-C signal the process group, which a worker
    leaves; systemd and SLURM signal every process of a job with SIGTERM, which a worker heeds from its parent alone.
    A worker starts with both signals blocked (`signals_blocked`), so that none ends it before this is set up.
    """
    os.setpgid(0, 0)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before there are threads, which inherit it
        threading.Thread(target=_end_for_parent, daemon=True).start()
    else:  # macOS has none
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if beside_gpu:
        os.nice(_NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already; the thread pool breaks after a fork
    cv2.setNumThreads(0)


def _end_for_parent() -> None:
    """Wait for SIGTERM, and end the process where the parent sent it, which is how it stops its workers."""
    parent = multiprocessing.parent_process()  # of a fork server's child, the process that asked for it
    pid = os.getppid() if parent is None else parent.pid
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
        pass
    os._exit(0)
