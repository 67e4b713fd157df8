"""The part of a picker that is there while several of them share their picks."""

from __future__ import annotations

import asyncio
import os
import uuid

from picker.app.config_sharing import SharingSettings
from picker.app.kvcache import Keep
from picker.core.director import Director
from picker.io.keep import Failed
from picker.io.kvcache.redis import redis_settings
from picker.io.sharing.picks import SharedPicks


class SharingPart:
    """Follows the configuration; what is known of others' requests goes when it is switched off."""

    def __init__(self, director: Director, keep: Keep, failed: Failed) -> None:
        self._director = director
        self._keep = keep
        self._failed = failed
        self._settings = SharingSettings()
        self._task: asyncio.Task[None] | None = None
        self.picks: SharedPicks | None = None

    @property
    def warm(self) -> bool:
        """Whether a picker that starts knows what others know, or has waited long enough."""
        return self.picks is None or self.picks.warm

    def configure(self, settings: SharingSettings) -> None:
        """Put a configuration in force."""
        if settings == self._settings:
            return
        self._settings = settings
        if self._task is not None:
            self._task.cancel()
            self._task = self.picks = None
        if settings.enabled:
            self.picks = SharedPicks(
                self._director,
                redis_settings(settings.redis, os.environ),
                settings.channel,
                name=uuid.uuid4().hex,
                batch_seconds=settings.batch_seconds,
                failed=self._failed,
            )
            self._task = self._keep("sharing", self.picks.run)

    async def stop(self) -> None:
        """Leave: the others forget our requests at once."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
