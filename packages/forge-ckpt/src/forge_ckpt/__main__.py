"""`python -m forge_ckpt`: the same commands as `forge-train ckpt`."""

from forge_ckpt.commands import app

if __name__ == "__main__":
    app(prog_name="python -m forge_ckpt")
