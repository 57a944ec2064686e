"""Find the folder that contains conf/, sweeps/, models/, train.py and the other entry points."""

from rl.runtime.commit import REPO

# The wheel has these files in the package offbyone (setup.py), and a checkout at its root.
SHIPPED = REPO if (REPO / "conf" / "train.yaml").exists() else REPO / "offbyone" / "files"
CONF = SHIPPED / "conf"
