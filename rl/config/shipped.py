"""Find the folder that contains conf/, sweeps/, models/, train.py and the other entry points."""

from envs.user_code import ROOT

# The wheel has these files in the package offbyone (setup.py), and a checkout at its root.
SHIPPED = ROOT if (ROOT / "conf" / "train.yaml").exists() else ROOT / "offbyone" / "files"
CONF = SHIPPED / "conf"
