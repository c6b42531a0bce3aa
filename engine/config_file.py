"""The TOML file of a run, read again when it changes."""

from __future__ import annotations

import stat
import time
from collections.abc import Sequence
from pathlib import Path

from engine.settings import Settings, load_settings
from engine.settings_fields import SettingsError

# A look costs a stat, which a network file system may take a millisecond for.
_EVERY_S = 0.5


class ConfigFile:
    """A settings file with the --set changes of the command line, which hold over whatever the file says later."""

    def __init__(self, path: str | Path, overrides: Sequence[str] = ()) -> None:
        self.path, self._overrides = Path(path), tuple(overrides)
        self._signature = self._doubted = self._look()
        self._next_look_s = time.monotonic() + _EVERY_S

    def load(self) -> Settings:
        """What the file says now. Raises SettingsError."""
        return load_settings(self.path, self._overrides)

    def changed(self, *, at_once: bool = False) -> Settings | None:
        """The settings, if the file is another than at the last look: a look is taken twice a second at most. at_once: the
        file is read now, whatever it looks like. Raises SettingsError, once for every change, for a file without settings,
        which counts as one when two looks have found it so."""
        now = time.monotonic()
        if not at_once and now < self._next_look_s:
            return None
        self._next_look_s = now + _EVERY_S
        signature = self._look()
        if not at_once and signature == self._signature:
            return None
        # Who saves a file empties it first, or takes it away: what is no settings file must be so at two looks.
        sure = at_once or signature == self._doubted
        self._doubted = signature
        try:
            settings = self._load_again(signature)
        except SettingsError:
            if not sure:
                return None
            self._signature = signature
            raise
        if not sure and (signature is None or not signature[1]):
            return None
        self._signature = signature
        return settings

    def _load_again(self, signature: tuple[int, int, int] | None) -> Settings:
        if signature is None and self.path.exists():
            raise SettingsError(
                f"{self.path}: expected a file that can be read again, found a folder, a pipe or a device; name a file"
            )
        return self.load()

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None  # of a pipe there is nothing to read a second time, and a wait without end
        return found.st_mtime_ns, found.st_size, found.st_ino
