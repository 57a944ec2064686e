"""The folder with the files that are not Python packages: conf/, sweeps/, models/, train.py."""

from pathlib import Path

_ROOT = Path(__file__).parents[2]
# The wheel has these files in the package offbyone (setup.py); a checkout has them at its root.
SHIPPED = _ROOT if (_ROOT / "conf" / "train.yaml").exists() else _ROOT / "offbyone" / "files"
CONF = SHIPPED / "conf"
