"""Trees of /sys, /proc and /etc as boards have them, made from documented paths; values are made up."""

from __future__ import annotations

import os

MEMINFO = """MemTotal:       {total} kB
MemFree:         1000000 kB
MemAvailable:   {available} kB
Buffers:          200000 kB
SwapTotal:      {swap} kB
SwapFree:       {swap_free} kB
"""
NVPMODEL = """# < POWER_MODEL ID=9 NAME=COMMENT >
< PARAM TYPE=FILE NAME=CPU_ONLINE >
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=120W >
GPU MAX_FREQ 1386000000
< PM_CONFIG DEFAULT=1 >
"""


def write(root, files):
    """Write files by their path under ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def hwmon(number, name, files):
    folder = f"sys/class/hwmon/hwmon{number}"
    return {f"{folder}/name": name, **{f"{folder}/{file}": value for file, value in files.items()}}


def ina3221(number, rails):
    """``rails``: (label, mV, mA) of channels 1, 2, 3; shunt channels as the driver adds them."""
    files = {"in4_input": 3, "in7_label": "sum of shunt voltages", "in7_input": 9, "curr4_input": 12}
    for channel, (label, millivolts, milliamperes) in enumerate(rails, 1):
        files |= {
            f"in{channel}_label": label,
            f"in{channel}_input": millivolts,
            f"curr{channel}_input": milliamperes,
            f"curr{channel}_crit_alarm": 0,
            f"curr{channel}_max": "32760 ma",
        }
    return hwmon(number, "ina3221", files)


def devfreq(name, now, least, limit, steps, governor="nvhost_podgov"):
    folder = f"sys/class/devfreq/{name}"
    available = " ".join(map(str, steps))
    values = (now, least, limit, available, governor)
    names = ("cur_freq", "min_freq", "max_freq", "available_frequencies", "governor")
    return {f"{folder}/{file}": value for file, value in zip(names, values, strict=True)}


def policy(number, now, limit, most):
    folder = f"sys/devices/system/cpu/cpufreq/policy{number}"
    names = ("scaling_cur_freq", "scaling_min_freq", "scaling_max_freq", "cpuinfo_max_freq", "scaling_governor")
    return {f"{folder}/{file}": value for file, value in zip(names, (now, 1, limit, most, "schedutil"), strict=True)}


def zones(named):
    files = {}
    for number, (name, value) in enumerate(named):
        files |= {f"sys/class/thermal/thermal_zone{number}/{key}": v for key, v in (("type", name), ("temp", value))}
    return files


def cooling(named):
    files = {}
    for number, (name, value) in enumerate(named):
        folder = f"sys/class/thermal/cooling_device{number}"
        files |= {f"{folder}/type": name, f"{folder}/cur_state": value}
    return files


def thor(root, *, available=120_000_000, mode="0001"):
    """Jetson AGX Thor with Jetson Linux 38.4 in the 120 W mode."""
    files = {
        "proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit\0",
        "etc/nv_tegra_release": "# R38 (release), REVISION: 4.0, GCID: 1, BOARD: generic, EABI: aarch64\n# more",
        "var/lib/nvpmodel/status": f"pmode:{mode}",
        "etc/nvpmodel.conf": NVPMODEL,
        "proc/meminfo": MEMINFO.format(total=128_790_092, available=available, swap=0, swap_free=0),
        **ina3221(0, [("VDD_GPU", 12000, 1500), ("VDD_CPU_SOC_MSS", 12000, 540), ("VIN_SYS_5V0", 5000, 1300)]),
        **hwmon(10, "ina238", {"in1_input": 19000, "curr1_input": 2100, "power1_input": 39900000}),
        **hwmon(2, "pwmfan", {"pwm1": 58}),
        **devfreq("bwmgr", 3200000000, 204000000, 4266000000, [], "tegra_wmark"),
        **devfreq("gpu-gpc-0", 1386000000, 306000000, 1386000000, [306000000, 1386000000, 1575000000]),
        **devfreq("gpu-nvd-0", 800000000, 306000000, 1692000000, [306000000, 1692000000]),
        **devfreq("8188050000.vic", 1, 1, 1, [1]),
        **policy(0, 2601000, 2601000, 2601000),
        **zones([("cpu-thermal", 53700), ("gpu-thermal", ""), ("soc012-thermal", 55100), ("tj-thermal", 55100)]),
        **cooling([("pwm-fan", 3), ("cpu-throttle-alert", 0), ("gpu-throttle-alert", 0), ("devfreq-gpu-gpc-0", 18)]),
    }
    (write(root, files) / "sys/class/thermal/thermal_zone1/temp").unlink()
    not_now(root / "sys/class/thermal/thermal_zone1/temp")
    return root


def orin(root, *, swap_used=0):
    """Jetson Orin NX with Jetson Linux 36.4.3; its GPU sleeps, and a rail is not connected."""
    swap = 8_000_000
    files = {
        "sys/firmware/devicetree/base/model": "NVIDIA Jetson Orin NX Engineering Reference Developer Kit\0",
        "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 2, BOARD: generic, EABI: aarch64",
        "var/lib/nvpmodel/status": "pmode:0007",
        "proc/meminfo": MEMINFO.format(total=16_000_000, available=9_000_000, swap=swap, swap_free=swap - swap_used),
        **ina3221(1, [("VDD_IN", 19000, 1000), ("VDD_CPU_GPU_CV", 19000, 200), ("NC", 0, 0)]),
        **hwmon(3, "soctherm_oc", {"oc1_event_cnt": 0, "oc1_throt_en": 1, "oc3_event_cnt": 37}),
        **devfreq("17000000.gpu", 306000000, 306000000, 918000000, [306000000, 918000000]),
        **devfreq("15340000.vic", 1, 1, 1, [1]),
        **policy(0, 729600, 1984000, 1984000),
        **policy(4, 729600, 1510400, 1984000),
        **zones([("cpu-thermal", 47400), ("tj-thermal", 48500), ("cv0-thermal", -256000)]),
        **cooling([("pwm-fan", 1), ("gpu-throttle-alert", 1), ("hot-surface-alert", 0)]),
        "sys/kernel/debug/bpmp/debug/clk/emc/rate": "3199000000",
        "sys/kernel/debug/bpmp/debug/clk/emc/max_rate": "3199000000",
    }
    return write(root, files)


_OPEN = []  # the writing ends of pipes: as long as they are open, reading answers EAGAIN


def not_now(path):
    """Put a file at ``path`` that answers EAGAIN, as a sensor of a sleeping part does."""
    os.mkfifo(path)
    _OPEN.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
