"""What Accelerate wraps, without its wrapping."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler


def plain_optimizer(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def plain_scheduler(scheduler: Any) -> Any:
    return scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
