"""What is installed: small, typed, and light to import."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import procgroup
import world

ROOT = Path(__file__).resolve().parents[2]


def test_importing_procgroup_imports_no_array_library() -> None:
    libraries = "{'numpy', 'torch', 'ml_dtypes', 'rich', 'psutil', 'jax', 'cupy'}"
    program = f"import sys, procgroup; print(sorted({libraries} & set(sys.modules)))"
    done = world.run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_launcher_starts_without_an_array_library() -> None:
    libraries = "{'numpy', 'torch', 'ml_dtypes', 'jax', 'cupy'}"
    program = (
        "import sys; from procgroup.__main__ import main\n"
        "try: main(['run', '--help'])\n"
        f"finally: print('imported', sorted({libraries} & set(sys.modules)))"
    )
    assert "imported []" in world.run_command([sys.executable, "-c", program]).stdout


def test_the_package_is_marked_as_typed() -> None:
    assert Path(procgroup.__file__).with_name("py.typed").exists()


def test_the_package_takes_megabytes_not_gigabytes() -> None:
    import procgroup._native

    # In an installation in place, what is compiled has a folder of its own.
    folders = {Path(procgroup.__file__).parent, Path(str(procgroup._native.__file__)).parent}
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    # Without Python's caches, of which a run of the tests adds more.
    assert sum(file.stat().st_size for file in files if file.suffix != ".pyc") < 6 << 20


def test_the_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_native_module_needs_no_library_but_the_system_s() -> None:
    import procgroup._native

    done = world.run_command(["ldd", str(procgroup._native.__file__)])
    needed = {Path(line.split()[0]).name.split(".so")[0] for line in done.stdout.splitlines() if ".so" in line}
    loader = {name for name in needed if name.startswith("ld-linux")}
    assert needed - loader <= {"linux-vdso", "libstdc++", "libm", "libgcc_s", "libc", "libpthread", "librt"}
