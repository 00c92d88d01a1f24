"""The signing key over the life of one process: looked for, loaded, followed.

Invariant: an apiserver that is away for a moment, or a Secret that is gone or unusable, ends no term: what is known is
used further.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from rlfleet.app.settings import Settings
from rlfleet.control.keys import SigningKeyError, SigningKeys
from rlfleet.kube.client import KubeClient
from rlfleet.kube.errors import ApiError
from rlfleet.kube.leader import Elector

log = logging.getLogger(__name__)

#: Seconds between two looks for the signing key while it does not exist yet.
KEY_SECONDS = 2.0


class SigningKeySource:
    """Reads the Secret that the settings name. ``found``: the key that this process needs can be read."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.found = False

    async def load(self, kube: KubeClient) -> SigningKeys:
        """The key, made if there is none."""
        while True:
            try:
                s = self._settings
                keys = await SigningKeys.load(kube, s.namespace, s.signing_key_secret, timeout=s.api_timeout)
            except ApiError as e:
                log.warning("signing key: %s; again in %g s", e, KEY_SECONDS)
                await asyncio.sleep(KEY_SECONDS)
                continue
            self.found = True
            return keys

    async def follow(self, kube: KubeClient, keys: SigningKeys) -> None:
        """Take a new key up without a restart, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.key_seconds)
            try:
                s = self._settings
                found = await SigningKeys.find(kube, s.namespace, s.signing_key_secret, timeout=s.api_timeout)
            except (ApiError, SigningKeyError) as e:
                log.warning("signing key: %s; going on with key %s", e, keys.current.kid)
                continue
            if found is None:
                log.warning("the Secret of the signing key is gone; going on with key %s", keys.current.kid)
            elif keys.adopt(found):
                log.info("signing with key %s; accepted are %s", keys.current.kid, ", ".join(keys.public_text()))

    async def look(self, kube: KubeClient, elector: Elector) -> None:
        """A standby is ready when it can read the key that it would need; the leader makes it at the first start."""
        while not elector.acquired.is_set():
            try:
                s = self._settings
                self.found = bool(await SigningKeys.find(kube, s.namespace, s.signing_key_secret))
            except ApiError as e:
                log.warning("signing key: %s", e)
            if self.found:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEY_SECONDS):
                    await elector.acquired.wait()
