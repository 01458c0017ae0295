"""What the shell may complete a word to: presets, and settings for `--set`."""

from flowdup.config import preset_names
from flowdup.setting_list import list_settings


def complete_preset(incomplete: str) -> list[str]:
    """Presets that begin so."""
    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys of settings that begin so."""
    keys = dict.fromkeys(setting.key for setting in list_settings())
    return [key for key in keys if key.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """As far as the equals sign: what stands behind it is the user's."""
    return [f"{key}=" for key in complete_key(incomplete)]
