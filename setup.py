"""Map the repository's top-level folders to ``specpilot.<folder>``."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("harness", "kernels", "mcp_server", "mechanisms", "memory")


def packages(folder: str) -> list[str]:
    return [folder] + [f"{folder}.{sub}" for sub in find_namespace_packages(folder)]


setup(
    packages=["specpilot"] + [f"specpilot.{p}" for folder in FOLDERS for p in packages(folder)],
    package_dir={f"specpilot.{folder}": folder for folder in FOLDERS},
)
