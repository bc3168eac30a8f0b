# Run first of all in the node's own namespaces: mounts and network. usage: namespace.sh FOLDER ADDRESS SERVICES
set -euo pipefail
folder=$1 address=$2 services=$3

# Nothing that is mounted from here on is seen outside. /sys is to show this namespace's network devices.
mount --make-rprivate /
mkdir -p "$folder"/{cgroup,logs}
mount --rbind /sys/fs/cgroup "$folder/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$folder/cgroup" /sys/fs/cgroup
umount -l "$folder/cgroup"
# containerd's shims and the kubelet use fixed paths below these two.
mount -t tmpfs tmpfs /run
mount --bind "$folder/logs" /var/log
mount --make-rshared /

# node0 comes from the other side; see tests/node.py.
for _ in $(seq 100); do
  [[ ! -e /sys/class/net/node0 ]] || break
  sleep 0.1
done
ip link set lo up
ip addr add "$address/30" dev node0
ip link set node0 up
ip route add "$services" dev node0 src "$address" # for the node's own calls to Services
ip route add unreachable default                 # a pod's call to the outside fails at once
sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1
hostname node-1
