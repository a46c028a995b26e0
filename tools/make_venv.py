"""make_venv.py FOLDER: a virtual environment, also on a Debian that has Python without its venv package."""
import os
import shutil
import subprocess
import sys

PACKAGE = "python3-venv"
OLD = f"debias_clip needs Python 3.10 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.11 …"
NO_VENV = (f"{sys.executable} cannot make a virtual environment. On Debian and Ubuntu: sudo apt-get install {PACKAGE}; "
           "then run make again.")


def made(folder) -> bool:
    "Makes the environment. Returns whether it could; Debian leaves one without pip, which is removed."
    done = subprocess.run([sys.executable, "-m", "venv", folder]).returncode == 0
    if not done: shutil.rmtree(folder, ignore_errors=True)
    return done


def main(folder):
    if sys.version_info < (3, 10): sys.exit(OLD)
    if made(folder): return
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"])
        subprocess.run(["apt-get", "install", "-y", "-qq", PACKAGE])
        if made(folder): return
    sys.exit(NO_VENV)


if __name__ == "__main__": main(sys.argv[1])
