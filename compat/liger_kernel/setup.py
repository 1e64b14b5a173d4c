"""The package, and metadata under the name that trainers ask for."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithMetadata(build_py):
    """`importlib.metadata.version("liger-kernel")` answers without an import."""

    def run(self):
        super().run()
        version = self.distribution.get_version()
        folder = Path(self.build_lib, f"liger_kernel-{version}.egg-info")
        folder.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {version}\nSummary: tigon-liger-compat\n"
        (folder / "PKG-INFO").write_text(text)
        (folder / "top_level.txt").write_text("liger_kernel\n")


setup(cmdclass={"build_py": WithMetadata})
