"""make_venv.py FOLDER: a virtual environment, also on a Debian that has Python without its venv package."""
import os, shutil, subprocess, sys

if sys.version_info < (3, 10): sys.exit(f"debias_clip needs Python 3.10 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.11 …")
folder = sys.argv[1]

def make():
    done = subprocess.run([sys.executable, "-m", "venv", folder]).returncode == 0
    if not done: shutil.rmtree(folder, ignore_errors=True)   # Debian leaves one without pip
    return done

package = "python3-venv"
if not make():
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"])
        subprocess.run(["apt-get", "install", "-y", "-qq", package])
        if make(): sys.exit(0)
    sys.exit(f"{sys.executable} cannot make a virtual environment. On Debian and Ubuntu: sudo apt-get install {package}; then run make again.")
