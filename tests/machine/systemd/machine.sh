#!/usr/bin/env bash
# A throw-away machine: systemd as process 1 in namespaces of its own, on an overlay over this system's root.
# Whatever it writes goes to a tmpfs that ends with it. When this script dies, however it dies, so does process 1,
# and with it every process of the machine.
#
#   machine.sh outer WORK [SOURCE:TARGET …]    in a mount namespace of its own; stays until the machine ends
#   machine.sh inner WORK [SOURCE:TARGET …]    becomes process 1
#
# WORK: an empty directory. SOURCE:TARGET: directories that the machine sees read-only at TARGET.
set -eu
stage=$1 work=$2
shift 2

outer() {
    mount -t tmpfs tmpfs "$work"
    mkdir "$work"/{cgroup,up,work,root}
    # A control group of our own: the machine takes it for the root of all of them.
    mount -t cgroup2 cgroup2 "$work/cgroup"
    for left in "$work"/cgroup/transferd-test-*; do # of a run that was killed; its processes are gone
        [ -d "$left" ] && [ ! -d "/proc/${left##*-}" ] && find "$left" -depth -type d -exec rmdir {} + || true
    done
    group="$work/cgroup/transferd-test-$$"
    mkdir "$group"
    echo 0 >"$group/cgroup.procs"
    setpriv --pdeathsig KILL unshare --pid --mount --uts --ipc --cgroup --net --fork --kill-child \
        "$BASH" "$0" inner "$work" "$@" &
    wait $! || true
    echo 0 >"$work/cgroup/cgroup.procs"
    find "$group" -depth -type d -exec rmdir {} + || true
}

inner() {
    root=$work/root
    mount -t overlay overlay -o "lowerdir=/,upperdir=$work/up,workdir=$work/work" "$root"
    for pair in "$@"; do
        mkdir -p "$root${pair#*:}"
        mount --bind -o ro "${pair%%:*}" "$root${pair#*:}"
    done
    cd "$root"
    mount -t proc proc proc
    mount -t sysfs -o ro sysfs sys
    mount -t cgroup2 cgroup2 sys/fs/cgroup
    mount -t tmpfs -o mode=755 tmpfs dev
    for device in null zero full random urandom tty; do
        touch "dev/$device"
        mount --bind "/dev/$device" "dev/$device"
    done
    mkdir dev/shm dev/pts
    ln -s pts/ptmx dev/ptmx # PrivateDevices= asks for it
    ln -s /proc/self/fd dev/fd
    mount -t tmpfs -o mode=1777 tmpfs dev/shm
    mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
    mount -t tmpfs -o mode=755 tmpfs run
    mount -t tmpfs -o mode=1777 tmpfs tmp
    mkdir run/host
    pivot_root . run/host
    umount -l /run/host
    rmdir /run/host
    hostname throwaway
    # It says so, so that systemd leaves alone what is the host's (udev, kernel settings, clocks).
    exec env -i container=transferd-test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=basic.target --show-status=no
}

"$stage" "$@"
