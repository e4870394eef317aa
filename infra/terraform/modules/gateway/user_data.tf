# What cloud-init writes and starts; secrets come from the parameter store at each boot.

locals {
  machine = "${path.module}/../../machine"
  units   = ["sllm-boot.service", "sllm-gateway.service", "sllm-controller.service", "sllm-watch.service"]

  cluster_env = templatefile("${path.module}/templates/cluster.env.tftpl", {
    home     = "/var/lib/sllm"
    nats_url = var.nats_url
    nats_ca  = "/run/sllm/nats-ca.pem"
    drain_s  = var.drain_s
    # Longer than the load balancer's: it must never find closed what it is about to use.
    keep_alive_s = var.idle_timeout_s + 60
    settings     = merge(var.settings, { AWS_DEFAULT_REGION = var.region })
  })

  boot_env = templatefile("${path.module}/templates/boot.env.tftpl", {
    group            = local.group
    region           = var.region
    artifact_url     = var.artifact_url
    artifact_sha256  = var.artifact_sha256
    parameter_prefix = var.parameter_prefix
    port             = var.port
    account          = "sllm"
    mount            = "/var/lib/sllm"
    prefix           = "/opt/sllm"
    run              = "/run/sllm"
  })

  cloud_config = templatefile("${local.machine}/user_data.yaml.tftpl", {
    mask  = []
    units = local.units
    files = merge(
      {
        "/etc/sllm/cluster.env"                              = local.cluster_env
        "/etc/sllm/boot.env"                                 = local.boot_env
        "/usr/local/lib/sllm/boot.sh"                        = file("${local.machine}/boot.sh")
        "/usr/local/lib/sllm/cloud.sh"                       = file("${local.machine}/aws.sh")
        "/usr/local/lib/sllm/stages.sh"                      = file("${local.machine}/gateway/stages.sh")
        "/usr/local/lib/sllm/watch.sh"                       = file("${local.machine}/gateway/watch.sh")
        "/etc/systemd/system/sllm-boot.service"              = file("${local.machine}/sllm-boot.service")
        "/etc/systemd/system/sllm-boot.service.d/again.conf" = file("${local.machine}/again.conf")
        "/etc/systemd/system/sllm-watch.service"             = file("${local.machine}/sllm-watch.service")
      },
      {
        for unit in ["sllm-gateway.service", "sllm-controller.service"] :
        "/etc/systemd/system/${unit}" => templatefile("${local.machine}/gateway/${unit}", { stop_timeout_s = var.drain_s + 30 })
      },
    )
  })

  user_data = base64gzip(local.cloud_config)
}
